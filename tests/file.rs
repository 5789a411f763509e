//! What the file reader makes of element types and metadata, and that others can read what is written.

use eda_wgpu::file::{self, Input, NamedTensor, ReadOptions};
use eda_wgpu::{Decay, DecayGate, Error, GateForm, Operand, Rule};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

/// A file with these metadata and tensors, as (name, dtype, shape, bytes).
fn bytes(metadata: &[(&str, &str)], tensors: &[(&str, &str, &[usize], Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let metadata: BTreeMap<_, _> = metadata.iter().copied().collect();
    header.insert("__metadata__".into(), serde_json::json!(metadata));
    let mut data: Vec<u8> = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let at = data.len();
        data.extend(bytes);
        let entry =
            serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, data.len()]});
        header.insert((*name).into(), entry);
    }
    let header = serde_json::to_vec(&header).expect("JSON");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

fn read(file: &[u8]) -> Result<Input, Error> {
    file::read_from(
        Cursor::new(file),
        file.len() as u64,
        Path::new("test"),
        &ReadOptions::default(),
    )
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

#[test]
fn every_element_type_is_converted() {
    let x = [0.5f32, -1.25, 3.0, 1024.0];
    let shape = &[1, 2, 1, 2][..];
    let file = bytes(
        &[("rule", "linear")],
        &[
            (
                "q",
                "F16",
                shape,
                x.iter()
                    .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                    .collect(),
            ),
            (
                "k",
                "BF16",
                shape,
                x.iter()
                    .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                    .collect(),
            ),
            (
                "v",
                "F64",
                shape,
                x.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
            ),
            ("initial_state", "F32", &[1, 1, 2, 2], f32s(&x)),
            ("expected_o", "F32", shape, f32s(&x)),
            (
                "expected_final_state",
                "F64",
                &[1, 1, 2, 2],
                [0.1f64; 4].map(f64::to_le_bytes).concat(),
            ),
        ],
    );
    let input = read(&file).expect("a good file");
    for (operand, values) in input.tensors.iter() {
        assert_eq!(values, &x, "{operand:?}");
    }
    assert_eq!(input.tensors.iter().count(), 4);
    assert_eq!(input.expected.o, Some(x.map(f64::from).to_vec()));
    assert_eq!(input.expected.final_state, Some(vec![0.1; 4]));
}

#[test]
fn offsets_are_read_from_both_integer_types() {
    let empty = |name| (name, "F32", &[1, 3, 1, 1][..], f32s(&[0.0; 3]));
    let with = |dtype, offsets: Vec<u8>| {
        let offsets = ("cu_seqlens", dtype, &[4][..], offsets);
        let tensors = [empty("q"), empty("k"), empty("v"), offsets];
        read(&bytes(&[("rule", "linear")], &tensors)).expect("a good file")
    };
    let expected = Some(vec![0, 2, 2, 3]);
    let narrow = with("I32", [0i32, 2, 2, 3].map(i32::to_le_bytes).concat());
    assert_eq!(narrow.problem.cu_seqlens, expected);
    let wide = with("I64", [0i64, 2, 2, 3].map(i64::to_le_bytes).concat());
    assert_eq!(wide.problem.cu_seqlens, expected);
}

/// One token of a layer's inputs for a rule, with `a` of `rank` 3 or 4.
fn layer(metadata: &[(&str, &str)], rank: usize) -> Result<Input, Error> {
    let rule = metadata[0].1;
    let (a, bias): (&[usize], &[usize]) = match rank {
        3 => (&[1, 1, 1], &[1]),
        _ => (&[1, 1, 1, 1], &[1, 1]),
    };
    let one = || f32s(&[1.0]);
    let vector = &[1, 1, 1, 1][..];
    let mut tensors = vec![
        ("q", "F32", vector, one()),
        ("k", "F32", vector, one()),
        ("v", "F32", vector, one()),
        ("a", "F32", a, one()),
        ("A_log", "F32", &[1][..], one()),
        ("dt_bias", "F32", bias, one()),
        ("beta_logit", "F32", &[1, 1, 1][..], one()),
    ];
    if rule == "eda" {
        tensors.push(("e", "F32", vector, one()));
        tensors.push(("gamma", "F32", &[1, 1, 1], one()));
    }
    read(&bytes(metadata, &tensors))
}

#[test]
fn decay_gates_default_by_rule_and_bound() {
    let gate = |metadata: &[(&str, &str)], rank| {
        let problem = layer(metadata, rank).expect("a good file").problem;
        assert_eq!(problem.decay_per_head, rank == 3);
        problem.decay
    };
    let safe = |lower_bound| Decay::Gate(DecayGate::Safe { lower_bound });
    let sigmoid = |lower_bound| Decay::Gate(DecayGate::Sigmoid { lower_bound });
    let softplus = Decay::Gate(DecayGate::Softplus);
    assert_eq!(gate(&[("rule", "eda")], 4), safe(-5.0));
    assert_eq!(
        gate(&[("rule", "eda"), ("lower_bound", "-3")], 4),
        safe(-3.0)
    );
    assert_eq!(
        gate(&[("rule", "eda"), ("decay_gate", "softplus")], 3),
        softplus
    );
    assert_eq!(gate(&[("rule", "kda")], 4), softplus);
    assert_eq!(
        gate(&[("rule", "kda"), ("lower_bound", "-5")], 4),
        sigmoid(-5.0)
    );
    assert_eq!(gate(&[("rule", "gdn")], 3), softplus);
    let bounded = [
        ("rule", "gdn"),
        ("decay_gate", "sigmoid"),
        ("lower_bound", "-2"),
    ];
    assert_eq!(gate(&bounded, 3), sigmoid(-2.0));

    let refused = |metadata: &[(&str, &str)], rank| layer(metadata, rank).expect_err("refused");
    // No bound to be had, or one that would have no effect.
    assert!(matches!(
        refused(&[("rule", "kda"), ("decay_gate", "sigmoid")], 4),
        Error::File { .. }
    ));
    assert!(matches!(
        refused(&[("rule", "gdn"), ("lower_bound", "-5")], 3),
        Error::File { .. }
    ));
    // A scalar decay has no channels.
    assert!(
        matches!(refused(&[("rule", "gdn")], 4), Error::Tensor { tensor, .. } if tensor == "a")
    );
}

#[test]
fn raw_names_normalise_unless_the_metadata_says_otherwise() {
    let problem = |metadata: &[(&str, &str)]| layer(metadata, 4).expect("a good file").problem;
    let plain = problem(&[("rule", "eda")]);
    assert!(plain.normalize);
    // Each gate has its own form.
    assert_eq!(
        (plain.beta, plain.gamma),
        (GateForm::Sigmoid, GateForm::Value)
    );
    assert!(!problem(&[("rule", "eda"), ("raw", "false")]).normalize);
    let negative = problem(&[("rule", "eda"), ("allow_neg_eigval", "true")]);
    assert_eq!(negative.beta, GateForm::TwiceSigmoid);
}

#[test]
fn factors_are_counted_where_the_metadata_does_not_say() {
    let six = || f32s(&[0.0; 6]);
    let two = || f32s(&[0.0; 2]);
    let tensors = [
        ("q", "F32", &[1, 2, 1, 1][..], two()),
        ("k", "F32", &[1, 6, 1, 1][..], six()),
        ("v", "F32", &[1, 6, 1, 1][..], six()),
        ("g", "F32", &[1, 2, 1][..], two()),
        ("beta", "F32", &[1, 6, 1][..], six()),
    ];
    let input = read(&bytes(&[("rule", "deltaproduct")], &tensors)).expect("a good file");
    assert_eq!(input.problem.rule, Rule::DeltaProduct { factors: 3 });
    assert_eq!(input.tensors.get(Operand::Beta).map(Vec::len), Some(6));
    let wrong = [("rule", "deltaproduct"), ("householders", "2")];
    let error = read(&bytes(&wrong, &tensors)).expect_err("four rows are expected");
    assert!(matches!(error, Error::Tensor { tensor, .. } if tensor == "k"));
}

#[test]
fn full_decay_is_legal_and_positive_decay_is_not() {
    let file = |g: f32| {
        let one = || f32s(&[0.5]);
        let vector = &[1, 1, 1, 1][..];
        let tensors = [
            ("q", "F32", vector, one()),
            ("k", "F32", vector, one()),
            ("v", "F32", vector, one()),
            ("g", "F32", vector, f32s(&[g])),
            ("beta", "F32", &[1, 1, 1][..], one()),
        ];
        read(&bytes(&[("rule", "kda")], &tensors))
    };
    assert!(file(f32::NEG_INFINITY).is_ok());
    for g in [1e-30, f32::INFINITY, f32::NAN] {
        assert!(matches!(file(g), Err(Error::Tensor { tensor, .. }) if tensor == "g"));
    }
}

#[test]
fn what_is_written_is_read_by_the_safetensors_crate_and_by_us() {
    let values: Vec<f32> = (0..4u8).map(f32::from).collect();
    let tensor = |name, shape: &[usize]| NamedTensor {
        name,
        shape: shape.to_vec(),
        values: &values,
    };
    let tensors = [
        tensor("q", &[1, 2, 1, 2]),
        tensor("k", &[1, 2, 1, 2]),
        tensor("v", &[1, 2, 1, 2]),
    ];
    let metadata = BTreeMap::from([("rule".to_string(), "linear".to_string())]);
    let mut file = Vec::new();
    file::write_to(&mut file, &tensors, &metadata).expect("memory takes everything");
    let theirs = safetensors::SafeTensors::deserialize(&file).expect("a safetensors file");
    assert_eq!(theirs.tensor("k").expect("k").data(), f32s(&values));
    let ours = read(&file).expect("a good file");
    assert_eq!(ours.tensors.get(Operand::V), Some(&values));
}

/// A program that is interrupted while it computes must not leave a temporary file beside its output.
#[test]
fn nothing_lies_in_the_folder_until_the_output_is_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = eda_wgpu::file::OutputFile::create(&folder.path().join("out.safetensors"));
    let _output = output.expect("a folder that can be written to");
    assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 0);
}
