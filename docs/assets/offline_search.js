// Search on pages that were opened from a disk. Browsers start no Worker there, so that its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve())
      this.load(url).then(() => {
        this.loaded = true
        this.waiting.forEach(data => this.postMessage(data))
      })
    }
    load(url) {
      const script = this.frame.contentDocument.createElement("script")
      script.src = url
      return new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
        this.frame.contentDocument.body.append(script)
      })
    }
    postMessage(data) {
      if (this.loaded) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }
    terminate() {
      this.frame.remove()
    }
  }
}
