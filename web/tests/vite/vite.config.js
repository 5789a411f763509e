export default {
  base: "./",
  worker: { format: "es" },
  build: { outDir: "dist", emptyOutDir: true },
};
