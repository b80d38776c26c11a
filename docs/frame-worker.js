// Search on pages that are opened from the disk, where browsers start no worker: its script runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = () => {};
      this.ready = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        script.onload = resolve;
        script.onerror = reject;
        script.src = new URL(address, location);
        frame.contentDocument.head.appendChild(script);
      });
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
}
