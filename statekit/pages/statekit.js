// Offers every plot as PNG too: its SVG, drawn twice as large. Pages are whole without this.
(() => {
  "use strict";
  const save = async (source, name) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = 2 * image.naturalWidth;
    canvas.height = 2 * image.naturalHeight;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    }, "image/png");
  };
  const offer = (root) => {
    for (const link of root.querySelectorAll('.files a[download$=".svg"]')) {
      const name = link.download.replace(/svg$/, "png");
      const others = [...link.parentElement.querySelectorAll("a")];
      if (others.some((other) => other.download === name || other.dataset.png === name)) continue;
      const made = document.createElement("a");
      made.href = link.href;
      made.dataset.png = name;
      made.textContent = "PNG";
      made.setAttribute("aria-label", (link.getAttribute("aria-label") || name).replace(/SVG$/, "PNG"));
      made.addEventListener("click", (event) => {
        event.preventDefault();
        save(link.href, name);
      });
      link.after(" ", made);
    }
  };
  offer(document);
  document.addEventListener("htmx:load", (event) => offer(event.target));
})();
