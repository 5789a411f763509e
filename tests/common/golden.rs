//! Reads the case files of `tests/data`: a problem, its tensors and what is right.

use eda_wgpu::rule::Rule;
use eda_wgpu::{Decay, DecayGate, GateForm, Operand, Problem, Tensors};
use safetensors::tensor::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// One case file.
pub struct Case {
    pub name: String,
    pub problem: Problem,
    pub tensors: Tensors<Vec<f32>>,
    pub o: Vec<f64>,
    pub final_state: Vec<f64>,
    #[allow(dead_code, reason = "not every test binary asks")]
    /// Whether `o` is stored in float64 (else float32, and known to about 1e-7 only).
    pub exact: bool,
}

/// Every case of a folder of `tests/data`, in order of name.
pub fn cases(folder: &str) -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(folder);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("the folder of cases")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no cases in {}", folder.display());
    files.iter().map(|path| read(path)).collect()
}

fn read(path: &Path) -> Case {
    let bytes = std::fs::read(path).expect("a readable file");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let metadata = header.metadata().clone().unwrap_or_default();
    let raw = metadata.get("raw").is_some_and(|x| x == "true");
    let number = |key: &str| {
        metadata
            .get(key)
            .map(|x| x.parse::<f32>().expect("a number"))
    };
    let shape = |name: &str| file.tensor(name).expect("a tensor").shape().to_vec();

    let factors = number("householders").map_or(1, |n| n as usize);
    let rule = Rule::from_name(&metadata["rule"], factors).expect("a known rule");
    let (q, v) = (shape("q"), shape("v"));
    let mut problem = Problem::new(rule, [q[0], q[1], q[2], v[2], q[3], v[3]]);
    problem.scale = number("scale");
    if raw {
        problem.normalize = true;
        problem.beta = GateForm::Sigmoid;
        problem.gamma = GateForm::Sigmoid;
        let lower_bound = number("lower_bound").expect("a lower bound");
        problem.decay = Decay::Gate(DecayGate::Safe { lower_bound });
    }
    if let Ok(offsets) = file.tensor("cu_seqlens") {
        let values = offsets.data().chunks_exact(4);
        let offsets = values.map(|b| i32::from_le_bytes(b.try_into().expect("4 bytes")));
        problem.cu_seqlens = Some(offsets.map(|x| x as usize).collect());
    }
    let mut tensors = Tensors::new();
    for operand in Operand::ALL {
        if problem.uses(operand)
            && let Ok(tensor) = file.tensor(problem.name(operand))
        {
            let values = floats(tensor.dtype(), tensor.data());
            tensors.set(operand, values.iter().map(|&x| x as f32).collect());
        }
    }
    let expected = |name: &str| {
        let tensor = file.tensor(name).expect("an expectation");
        (floats(tensor.dtype(), tensor.data()), tensor.dtype())
    };
    let (o, dtype) = expected("expected_o");
    Case {
        name: path.file_stem().expect("a name").to_string_lossy().into(),
        problem,
        tensors,
        o,
        final_state: expected("expected_final_state").0,
        exact: dtype == Dtype::F64,
    }
}

fn floats(dtype: Dtype, data: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")).into())
            .collect(),
        Dtype::F64 => data
            .chunks_exact(8)
            .map(|b| f64::from_le_bytes(b.try_into().expect("8 bytes")))
            .collect(),
        other => panic!("unexpected type {other:?}"),
    }
}
