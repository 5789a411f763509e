use eda_wgpu::gpu::{plan, shaders::*};
use eda_wgpu::*;
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    let p = Problem::new(Rule::Eda, [1, 4096, 16, 16, 128, 128]);
    let s = chunk(&p);
    for pass in [Pass::Pairs, Pass::Solve, Pass::Fold, Pass::Scan, Pass::Decode] {
        let mut v = variant(pass, &p, Element::F32, 0);
        v.by_four = can_read_by_four(pass, &p);
        let t = unroll(&source(pass, v), &[]);
        std::fs::write(format!("{dir}/{}.wgsl", pass.name()), t).unwrap();
        let c: Vec<String> = constants(pass, &p, Some(&s)).iter().map(|(n, v)| format!("{n} {v}")).collect();
        std::fs::write(format!("{dir}/{}.const", pass.name()), c.join("\n")).unwrap();
    }
}
fn chunk(p: &Problem) -> ChunkShape { plan::chunk_shape(p, None).unwrap() }
