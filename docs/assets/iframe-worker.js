// Search runs in a worker, and browsers start no worker for a page that was opened as a file. For such pages this runs
// the worker's script in a hidden frame, so that search works without a server. The offline plugin would load a script
// for this from another host; it does not where mkdocs.yml names one of this file's name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const script = document.createElement("script");
      script.src = new URL(url, document.baseURI);
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      this.frame.srcdoc = script.outerHTML;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      this.loaded.then(() => {
        this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
