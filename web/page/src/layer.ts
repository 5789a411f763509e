export function layerView(): void {}
