export function measure(): void {}
