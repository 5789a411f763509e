import sys,re
root=sys.argv[1]
p=root+"/src/gpu/kernels.rs"
s=open(p).read()
anchor="        let built = guarded(&self.device, pass.name(), 0, || {\n            let source = wgpu::ShaderModuleDescriptor"
assert anchor in s
hook='''        #[cfg(not(target_arch = "wasm32"))]
        {
            if let Ok(files) = std::env::var("EDA_PATCH") {
                for f in files.split(',').filter(|f| !f.is_empty()) {
                    let patch = std::fs::read_to_string(f).expect(f);
                    for part in patch.split("=====\\n") {
                        let Some((from, to)) = part.split_once("\\n-----\\n") else { continue };
                        if shaders::source(pass, variant).contains(from) {
                            eprintln!("patch {f}: {}", pass.name());
                            let t = shaders::source(pass, variant);
                            let t = PATCHED.with(|p| { let mut p = p.borrow_mut(); let e = p.entry(pass.name()).or_insert(t); *e = e.replace(from, to); e.clone() });
                            text = if !self.software { shaders::unroll(&t, unrolled) } else { t };
                        }
                    }
                }
            }
            if let Ok(dir) = std::env::var("EDA_DUMP") {
                std::fs::create_dir_all(&dir).unwrap();
                let name = format!("{dir}/{}", pass.name());
                std::fs::write(format!("{name}.wgsl"), &text).unwrap();
                let c: Vec<String> = constants.iter().map(|(n, v)| format!("{n} {v}")).collect();
                std::fs::write(format!("{name}.const"), c.join("\\n")).unwrap();
            }
        }
'''
s=s.replace(anchor,hook+anchor)
s=s.replace("impl Kernels {\n","thread_local! { static PATCHED: std::cell::RefCell<HashMap<&'static str, String>> = Default::default(); }\nimpl Kernels {\n",1)
open(p,"w").write(s)
p=root+"/src/gpu/matrix.rs"
s=open(p).read()
s=s.replace("        let many = 1.45 * waves(32) < waves(16);","        let many = match env(\"EDA_COLUMNS\") { Some(c) => c == 32, None => 1.45 * waves(32) < waves(16) };",1)
s=s.replace("            run: 4,","            run: env(\"EDA_RUN\").unwrap_or(4),",1)
#assert "groups: (if columns == 16 { 192 } else { 256 }" in s
#s=s.replace("groups: (if columns == 16 { 192 } else { 256 }","groups: (env(\"EDA_SCAN\").unwrap_or(if columns == 16 { 192 } else { 256 })",1)
s=s.replace("2 * shape.pairs_memory(factors) <= memory", "match env(\"EDA_SLABS\") { Some(n) => shape.slabs == n, None => 2 * shape.pairs_memory(factors) <= memory }",1)
s=s.replace("const SCAN_THREADS: usize = 256;","fn scan_threads() -> usize { env(\"EDA_SCAN\").unwrap_or(256) }",1)
s=s.replace("SCAN_THREADS","scan_threads()")
s+="\nfn env(n: &str) -> Option<usize> { std::env::var(n).ok().and_then(|x| x.parse().ok()) }\n"
open(p,"w").write(s)
