// What the theme's scripts add to a page, made reachable. A table that is wider than its page scrolls in a box of its
// own, which the keyboard must be able to reach; and the bars of buttons on code need names to tell them apart by ear.
document.addEventListener("DOMContentLoaded", () => {
  const reach = () => {
    document.querySelectorAll(".md-typeset__table, .md-typeset__scrollwrap").forEach((box) => {
      if (box.scrollWidth > box.clientWidth) { box.tabIndex = 0; }
    });
    document.querySelectorAll(".md-code__nav").forEach((bar, index) => { bar.ariaLabel = `Code ${index + 1}`; });
  };
  setTimeout(reach, 200);
});
