// A table that is wider than its page scrolls in a box of its own, which the keyboard must be able to reach.
document.addEventListener("DOMContentLoaded", () => {
  const reach = () => document.querySelectorAll(".md-typeset__table, .md-typeset__scrollwrap").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) { box.tabIndex = 0; }
  });
  setTimeout(reach, 200);
});
