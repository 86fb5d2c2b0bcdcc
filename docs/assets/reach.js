// What the theme's scripts add to a page, made reachable. A box that is wider than its page scrolls, which its edge shows
// and the keyboard must be able to do; and the bars of buttons on code need names to tell them apart by ear.
document.addEventListener("DOMContentLoaded", () => {
  const reach = () => {
    document.querySelectorAll(".md-typeset__table, .md-typeset__scrollwrap, .equation, .wide-picture, pre > code").forEach((box) => {
      if (box.scrollWidth > box.clientWidth) { box.tabIndex = 0; box.classList.add("goes-on"); }
    });
    document.querySelectorAll(".md-code__nav").forEach((bar, index) => { bar.ariaLabel = `Code ${index + 1}`; });
  };
  setTimeout(reach, 200);
});
