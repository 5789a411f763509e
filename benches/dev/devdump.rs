use eda_wgpu::gpu::{matrix::MatrixUnits, shaders::*};
use eda_wgpu::*;
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    let mut limits = wgpu::Limits::default();
    limits.max_compute_workgroup_storage_size = 49152; limits.max_compute_invocations_per_workgroup = 1024;
    for (name, rule, c) in [("eda", Rule::Eda, 32), ("kda", Rule::Kda, 64), ("dp3", Rule::DeltaProduct { factors: 3 }, 16), ("rwkv7", Rule::Rwkv7, 32), ("edac16", Rule::Eda, 16)] {
        let p = Problem::new(rule, [1, 4096, 16, 16, 128, 128]);
        let s = ChunkShape::on_matrix_units(&p, c, MatrixUnits { edge: 16, subgroup: 32 }, &limits, std::env::var("WIDTH").map_or(128, |w| w.parse().unwrap())).unwrap();
        println!("{name} {:?}", s.matrix);
        for pass in [Pass::MatrixPairs, Pass::MatrixSolve, Pass::MatrixScan] {
            let mut v = variant(pass, &p, Element::F16, 16);
            v.by_four = pass == Pass::MatrixPairs;
            let t = unroll(&source(pass, v), &s.matrix.unwrap().unrolled());
            std::fs::write(format!("{dir}/{name}_{}.wgsl", pass.name()), t).unwrap();
            let c: Vec<String> = constants(pass, &p, Some(&s)).iter().map(|(n, v)| format!("{n} {v}")).collect();
            std::fs::write(format!("{dir}/{name}_{}.const", pass.name()), c.join("\n")).unwrap();
        }
    }
}
