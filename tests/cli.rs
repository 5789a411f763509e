//! The command line as a user meets it: the built program, real files, exit status and streams.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn eda(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_eda"))
        .args(args)
        .env("EDA_NO_CACHE", "1")
        .output()
        .expect("the program runs")
}

fn data(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(folder)
}

fn golden(name: &str) -> String {
    let path = data("golden").join(format!("{name}.safetensors"));
    path.to_str().expect("a UTF-8 path").to_string()
}

/// Every golden and real file.
fn files() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = ["golden", "real"]
        .iter()
        .flat_map(|folder| std::fs::read_dir(data(folder)).expect("the folder of cases"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    assert_eq!(files.len(), 25);
    files
}

fn json(output: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).expect("one JSON object")
}

/// Status 2, nothing on stdout, and one line on stderr that has each of `parts`.
fn assert_refused(what: &str, output: &Output, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {stderr}");
    assert!(output.stdout.is_empty(), "{what}");
    assert_eq!(stderr.lines().count(), 1, "{what}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{what}: no `{part}` in {stderr}");
    }
}

/// A file to be spoiled.
#[derive(Clone)]
struct Draft {
    metadata: HashMap<String, String>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Draft {
    fn of(name: &str) -> Self {
        let bytes = std::fs::read(golden(name)).expect("a golden file");
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
        let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        Self {
            metadata: header.metadata().clone().unwrap_or_default(),
            tensors: file
                .tensors()
                .into_iter()
                .map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
                .collect(),
        }
    }

    fn without(mut self, name: &str) -> Self {
        self.tensors.remove(name).expect("that tensor");
        self
    }

    fn with(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        self.tensors
            .insert(name.into(), (dtype, shape.to_vec(), bytes));
        self
    }

    fn zeros(self, name: &str, shape: &[usize]) -> Self {
        let bytes = vec![0; 4 * shape.iter().product::<usize>()];
        self.with(name, Dtype::F32, shape, bytes)
    }

    fn offsets(self, offsets: &[i64]) -> Self {
        let bytes = offsets.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.with("cu_seqlens", Dtype::I64, &[offsets.len()], bytes)
    }

    /// Puts `x` at float32 position `i` of a tensor.
    fn value(mut self, name: &str, i: usize, x: f32) -> Self {
        let (_, _, bytes) = self.tensors.get_mut(name).expect("that tensor");
        bytes[4 * i..4 * i + 4].copy_from_slice(&x.to_le_bytes());
        self
    }

    fn meta(mut self, key: &str, value: &str) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor");
            (name.clone(), view)
        });
        safetensors::serialize(views, Some(self.metadata.clone())).expect("a file")
    }
}

/// A header as text before `data` zero bytes.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

#[test]
fn bad_input_exits_2_and_names_file_tensor_expected_and_found() {
    // B 1, T 33, H = HV = 1, K 20, V 12, initial state.
    let good = || Draft::of("eda_odd_sizes");
    // T 130, five sequences.
    let packed = || Draft::of("eda_varlen");
    let layer = || Draft::of("eda_raw_layer_inputs");
    let delta = r#"{"__metadata__":{"rule":"linear"},"#;
    let tensor = |name: &str, shape: &str, from: u64, to: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let three = |q: &str, k: &str, v: &str| format!("{delta}{q},{k},{v}}}");
    let (q, k, v) = (
        tensor("q", "[1,1,1,1]", 0, 4),
        tensor("k", "[1,1,1,1]", 4, 8),
        tensor("v", "[1,1,1,1]", 8, 12),
    );
    let mut truncated = good().bytes();
    truncated.truncate(truncated.len() - 7);
    let mut lengthened = good().bytes();
    lengthened.push(0);
    let mut long_header = good().bytes();
    long_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut not_utf8 = good().bytes();
    not_utf8[10] = 0xff;

    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        (
            "missing",
            good().without("e").bytes(),
            &["`e`", "[1, 33, 1, 20]", "no such tensor"],
        ),
        (
            "missing q",
            good().without("q").bytes(),
            &["`q`", "[B, T, H, K]", "no such tensor"],
        ),
        (
            "missing A_log",
            layer().without("A_log").bytes(),
            &["`A_log`", "[4]", "no such tensor"],
        ),
        (
            "missing a",
            layer().without("a").bytes(),
            &["`a`", "[1, 70, 4, 32]", "no such tensor"],
        ),
        (
            "extra",
            good().zeros("p", &[1, 33, 1, 20]).bytes(),
            &["`p`", "rule eda", "extra tensor of shape [1, 33, 1, 20]"],
        ),
        (
            "extra g beside a",
            layer().zeros("g", &[1, 70, 4, 32]).bytes(),
            &["`g`", "extra tensor"],
        ),
        (
            "a name of several lines",
            good().zeros("x\ny", &[1]).bytes(),
            &["x\\ny", "extra tensor"],
        ),
        (
            "rank of q",
            good().zeros("q", &[33, 20]).bytes(),
            &["`q`", "4 dimensions [B, T, H, K]", "[33, 20]"],
        ),
        (
            "rank of g",
            good().zeros("g", &[33, 20]).bytes(),
            &["`g`", "4 dimensions", "3 [B, T, HV]", "[33, 20]"],
        ),
        (
            "rank of beta",
            good().zeros("beta", &[33]).bytes(),
            &["`beta`", "[1, 33, 1]", "[33]"],
        ),
        (
            "size",
            good().zeros("k", &[1, 32, 1, 20]).bytes(),
            &["`k`", "[1, 33, 1, 20]", "[1, 32, 1, 20]"],
        ),
        (
            "size of the state",
            good().zeros("initial_state", &[2, 1, 20, 12]).bytes(),
            &["`initial_state`", "[1, 1, 20, 12]", "[2, 1, 20, 12]"],
        ),
        (
            "size of an expectation",
            good().zeros("expected_o", &[1, 33, 1, 20]).bytes(),
            &["`expected_o`", "[1, 33, 1, 12]", "[1, 33, 1, 20]"],
        ),
        (
            "head size",
            Draft::of("linear_basic")
                .zeros("q", &[2, 71, 2, 257])
                .bytes(),
            &["key_dim", "257", "1 to 256"],
        ),
        (
            "HV not a multiple of H",
            layer().zeros("v", &[1, 70, 3, 32]).bytes(),
            &["`v`", "multiple of the 2 key heads", "3 value heads"],
        ),
        (
            "decreasing offsets",
            packed().offsets(&[0, 50, 40, 130]).bytes(),
            &["`cu_seqlens`", "do not decrease", "40 after 50 at index 2"],
        ),
        (
            "overrunning offsets",
            packed().offsets(&[0, 50, 131]).bytes(),
            &["`cu_seqlens`", "130", "131"],
        ),
        (
            "negative offsets",
            packed().offsets(&[0, -3, 130]).bytes(),
            &["`cu_seqlens`", "not negative", "-3 at index 1"],
        ),
        (
            "offsets of floats",
            packed().zeros("cu_seqlens", &[6]).bytes(),
            &["`cu_seqlens`", "I32 or I64", "F32"],
        ),
        (
            "rank of offsets",
            packed()
                .with("cu_seqlens", Dtype::I32, &[2, 3], vec![0; 24])
                .bytes(),
            &["`cu_seqlens`", "1 dimensions [N + 1]", "[2, 3]"],
        ),
        (
            "packed batch",
            Draft::of("linear_basic").offsets(&[0, 142]).bytes(),
            &["`cu_seqlens`", "batch 1", "batch 2"],
        ),
        (
            "positive g",
            good().value("g", 25, 0.5).bytes(),
            &["`g`", "at most 0", "0.5 at index [0, 1, 0, 5]"],
        ),
        (
            "NaN",
            good().value("v", 13, f32::NAN).bytes(),
            &["`v`", "finite", "NaN at index [0, 1, 0, 1]"],
        ),
        (
            "inf in a state",
            good().value("initial_state", 12, f32::NEG_INFINITY).bytes(),
            &["`initial_state`", "finite", "-inf at index [0, 0, 1, 0]"],
        ),
        (
            "type",
            good()
                .with("beta", Dtype::U8, &[1, 33, 1], vec![0; 33])
                .bytes(),
            &["`beta`", "F32, F16, BF16 or F64", "U8"],
        ),
        (
            "integers",
            good()
                .with("beta", Dtype::I32, &[1, 33, 1], vec![0; 132])
                .bytes(),
            &["`beta`", "F32, F16, BF16 or F64", "I32"],
        ),
        (
            "rule",
            good().meta("rule", "edda").bytes(),
            &["rule", "`edda`", "rwkv7"],
        ),
        (
            "scale",
            good().meta("scale", "half").bytes(),
            &["`scale`", "a number", "`half`"],
        ),
        (
            "scale that is not finite",
            good().meta("scale", "inf").bytes(),
            &["scale", "finite", "inf"],
        ),
        (
            "raw",
            good().meta("raw", "perhaps").bytes(),
            &["`raw`", "`true` or `false`", "`perhaps`"],
        ),
        (
            "householders",
            Draft::of("deltaproduct_basic")
                .meta("householders", "17")
                .bytes(),
            &["householders", "17", "1 to 16"],
        ),
        (
            "householders of another rule",
            good().meta("householders", "2").bytes(),
            &["householders", "none or 1", "found 2"],
        ),
        (
            "lower bound",
            layer().meta("lower_bound", "5").bytes(),
            &["lower_bound", "below 0", "5"],
        ),
        (
            "decay gate",
            layer().meta("decay_gate", "hard").bytes(),
            &["`decay_gate`", "`softplus`", "`hard`"],
        ),
        (
            "bound of an unbounded gate",
            layer().meta("decay_gate", "softplus").bytes(),
            &["`lower_bound`", "none", "-5"],
        ),
        ("truncated", truncated, &["data offsets"]),
        (
            "trailing bytes",
            lengthened,
            &["bytes of tensors after the header"],
        ),
        ("empty", vec![], &["header", "0 bytes"]),
        (
            "header longer than the file",
            long_header,
            &["header of at most", "18446744073709551615"],
        ),
        ("not UTF-8", not_utf8, &["bad safetensors header"]),
        (
            "not JSON",
            raw("{]", 0),
            &["bad safetensors header", "column"],
        ),
        (
            "deep JSON",
            raw(&"[".repeat(100_000), 0),
            &["bad safetensors header"],
        ),
        (
            "deep JSON in a tensor",
            raw(&format!("{{\"q\":{}", "[".repeat(100_000)), 0),
            &["bad safetensors header", "`q`"],
        ),
        (
            "repeated tensor",
            raw(&three(&q, &q, &v), 12),
            &["each key once", "`q`"],
        ),
        (
            "overlap",
            raw(&three(&q, &tensor("k", "[1,1,1,1]", 2, 6), &v), 12),
            &["`k`", "from 4", "2 to 6"],
        ),
        (
            "gap",
            raw(&three(&q, &tensor("k", "[1,1,1,1]", 5, 9), &v), 12),
            &["`k`", "from 4", "5 to 9"],
        ),
        (
            "backwards",
            raw(&three(&q, &tensor("k", "[1,1,1,1]", 4, 0), &v), 12),
            &["`k`", "4 to 0"],
        ),
        (
            "past the end",
            raw(&three(&q, &k, &tensor("v", "[1,1,1,1]", 8, 1 << 40)), 12),
            &["`v`", "at most 12", "8 to 1099511627776"],
        ),
        (
            "bytes and shape",
            raw(&three(&q, &tensor("k", "[1,2,1,1]", 4, 8), &v), 12),
            &["`k`", "8 bytes", "4 bytes"],
        ),
        (
            "overflowing shape",
            raw(
                &three(
                    &q,
                    &k,
                    &tensor("v", "[4294967296,4294967296,4294967296,4]", 8, 12),
                ),
                12,
            ),
            &["`v`", "fits 64 bits"],
        ),
        (
            "a batch of nothing",
            raw(
                &three(
                    &tensor("q", "[1099511627776,0,1,1]", 0, 0),
                    &tensor("k", "[1099511627776,0,1,1]", 0, 0),
                    &tensor("v", "[1099511627776,0,1,1]", 0, 0),
                ),
                0,
            ),
            &["batch", "1099511627776"],
        ),
        (
            "no rule",
            raw(&format!("{{{q},{k},{v}}}"), 12),
            &["`rule`", "found none"],
        ),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad input.safetensors");
    let name = path.to_str().expect("a UTF-8 path");
    for (what, bytes, parts) in cases {
        std::fs::write(&path, bytes).expect("a written file");
        let output = eda(&["run", name, "--mode", "recurrent"]);
        assert_refused(what, &output, parts);
        assert_refused(what, &output, &[name]);
    }
}

#[test]
fn files_that_are_no_files_are_refused() {
    let folder = data("golden");
    let folder = folder.to_str().expect("a UTF-8 path");
    assert_refused(
        "a folder",
        &eda(&["run", folder]),
        &[folder, "regular file"],
    );
    assert_refused(
        "nothing",
        &eda(&["run", "no/such.safetensors"]),
        &["no/such.safetensors"],
    );
    assert_refused("empty name", &eda(&["run", ""]), &[]);
}

#[test]
fn contradictory_flags_are_refused() {
    let file = golden("eda_basic");
    let cases: &[(&[&str], &[&str])] = &[
        (
            &["--mode", "decode", "--chunk", "16"],
            &["--chunk", "mode chunk", "mode decode"],
        ),
        (
            &["--mode", "recurrent", "--chunk", "16"],
            &["--chunk", "mode recurrent"],
        ),
        (
            &["--mode", "decode", "--split", "3"],
            &["--split", "mode decode"],
        ),
        (
            &["--mode", "recurrent", "--dtype", "f16"],
            &["--dtype", "mode recurrent"],
        ),
        (
            &["--mode", "recurrent", "--backend", "vulkan"],
            &["--backend", "recurrent"],
        ),
        (
            &["--mode", "recurrent", "--adapter", "0"],
            &["--adapter", "recurrent"],
        ),
        (
            &["--mode", "recurrent", "--tier", "portable"],
            &["--tier", "recurrent"],
        ),
        (
            &["--backend", "cpu", "--adapter", "0"],
            &["--adapter", "--backend cpu"],
        ),
        (
            &["--mode", "decode", "--segments", "3"],
            &["--segments", "mode decode"],
        ),
        (
            &["--backend", "cpu", "--segments", "3"],
            &["--segments", "--backend cpu"],
        ),
        (&["--segments", "65"], &["65", "--segments", "64"]),
        (&["--segments", "-1"], &["-1", "--segments", "64"]),
        (&["--chunk", "17"], &["17", "--chunk", "16, 32, 64"]),
        (&["--mode", "chunks"], &["chunks", "--mode", "recurrent"]),
        (&["--rule", "edda"], &["edda", "--rule", "deltaproduct"]),
        (&["--split", "3,x"], &["x", "--split"]),
        (&["--scale", "one"], &["one", "--scale"]),
        (
            &["--scale", "nan", "--mode", "recurrent"],
            &["scale", "NaN", "finite"],
        ),
        (&["--no-such-flag"], &["--no-such-flag"]),
    ];
    for (flags, parts) in cases {
        let args = [&["run", &file], *flags].concat();
        assert_refused(&args.join(" "), &eda(&args), parts);
    }
    assert_refused("no input", &eda(&["run"]), &["IN.safetensors"]);
    assert_refused("no such command", &eda(&["walk"]), &["walk"]);
}

#[test]
fn help_says_how_and_what_the_exit_status_means() {
    let help = eda(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout);
    for part in ["Examples:", "eda run", "eda check", "Exit status:"] {
        assert!(text.contains(part), "{text}");
    }
    let help = eda(&["run", "--help"]);
    assert!(help.status.success());
    let text = String::from_utf8_lossy(&help.stdout);
    for part in [
        "--split",
        "--allow-non-finite",
        "gamma_logit",
        "Without it nothing is written",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn json_has_exactly_the_promised_keys() {
    let output = eda(&[
        "run",
        &golden("eda_grouped_values"),
        "--mode",
        "recurrent",
        "--json",
    ]);
    let report = json(&output);
    let text = String::from_utf8_lossy(&output.stdout);
    let keys = [
        "adapter",
        "backend",
        "tier",
        "rule",
        "mode",
        "segments",
        "batch",
        "tokens",
        "heads",
        "value_heads",
        "key_dim",
        "value_dim",
        "dtype",
        "compute_ms",
        "wall_ms",
        "error_o",
        "error_final_state",
    ];
    assert_eq!(report.as_object().expect("an object").len(), keys.len());
    let places: Vec<usize> = keys
        .iter()
        .map(|key| text.find(&format!("\"{key}\":")).expect(key))
        .collect();
    assert!(places.is_sorted(), "{text}");
    assert_eq!(report["backend"], "cpu");
    assert_eq!(report["tier"], "reference");
    assert_eq!(report["rule"], "eda");
    assert_eq!(report["mode"], "recurrent");
    let sizes = [
        "batch",
        "tokens",
        "heads",
        "value_heads",
        "key_dim",
        "value_dim",
    ];
    assert_eq!(
        sizes.map(|key| report[key].as_u64()),
        [1, 50, 2, 4, 64, 48].map(Some)
    );
    assert!(report["compute_ms"].as_f64() >= Some(0.0));
}

#[test]
fn json_is_null_where_nothing_is_expected_and_a_number_where_the_error_is_infinite() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("in.safetensors");
    let name = path.to_str().expect("a UTF-8 path");
    let draft = Draft::of("eda_odd_sizes")
        .without("expected_o")
        .value("v", 0, f32::NAN);
    std::fs::write(&path, draft.bytes()).expect("a written file");
    let report = json(&eda(&[
        "run",
        name,
        "--mode",
        "recurrent",
        "--allow-non-finite",
        "--json",
    ]));
    assert!(report["error_o"].is_null());
    assert_eq!(report["error_final_state"].as_f64(), Some(f64::MAX));
}

fn errors(report: &serde_json::Value) -> [f64; 2] {
    ["error_o", "error_final_state"].map(|key| report[key].as_f64().expect(key))
}

#[test]
fn recurrent_mode_is_the_reference() {
    for file in files() {
        let name = file.to_str().expect("a UTF-8 path");
        // The real files hold expected_o in float32.
        let limit = if name.contains("kjv") { 1e-6 } else { 1e-9 };
        let report = json(&eda(&["run", name, "--mode", "recurrent", "--json"]));
        let [o, state] = errors(&report);
        assert!(o <= limit && state <= 1e-9, "{name}: {o}, {state}");
    }
}

#[test]
fn cpu_engine_is_right_in_every_mode() {
    for file in files() {
        let name = file.to_str().expect("a UTF-8 path");
        let tokens = json(&eda(&["run", name, "--mode", "recurrent", "--json"]))["tokens"]
            .as_u64()
            .expect("tokens");
        let split = format!("0,{},{},{tokens}", tokens / 3, tokens / 2);
        let runs: [&[&str]; 6] = [
            &[],
            &["--chunk", "16"],
            &["--chunk", "32"],
            &["--chunk", "64"],
            &["--split", &split],
            &["--mode", "decode"],
        ];
        for flags in runs {
            let args = [&["run", name, "--backend", "cpu", "--json"], flags].concat();
            let [o, state] = errors(&json(&eda(&args)));
            assert!(o <= 1e-5 && state <= 1e-5, "{args:?}: {o}, {state}");
        }
    }
}

#[test]
fn segments_are_computed_at_the_same_time_on_a_gpu() {
    let file = golden("eda_ragged_state");
    let backend = if cfg!(target_os = "macos") {
        "metal"
    } else if cfg!(windows) {
        "dx12"
    } else {
        "vulkan"
    };
    for segments in ["1", "2", "64"] {
        let args = ["run", &file, "--backend", backend, "--json"];
        let flags = ["--segments", segments, "--chunk", "16"];
        let report = json(&eda(&[&args[..], &flags].concat()));
        let [o, state] = errors(&report);
        assert!(o <= 1e-5 && state <= 1e-5, "{segments}: {o}, {state}");
        assert_eq!(report["segments"] == 0, segments == "1", "{report}");
    }
}

/// Whoever names a kernel family gets it, or an error: never the CPU engine.
#[test]
fn a_tier_is_run_or_refused() {
    let file = golden("eda_basic");
    let output = eda(&["run", &file, "--tier", "portable", "--json"]);
    if output.status.success() {
        assert_eq!(json(&output)["tier"], "portable");
    } else {
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("tier portable"), "{message}");
    }
}

/// Segments are a GPU's: whoever asks for some gets them, or an error.
#[test]
fn segments_are_run_or_refused() {
    let file = golden("eda_basic");
    let asked = ["--segments", "3", "--chunk", "16", "--json"];
    let output = eda(&[&["run", &file][..], &asked].concat());
    if output.status.success() {
        assert_ne!(json(&output)["segments"], 0);
    } else {
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains("--segments 3"), "{message}");
    }
}

#[test]
fn split_points_must_lie_in_the_problem_and_not_decrease() {
    let file = golden("eda_basic");
    for split in ["65", "30,20"] {
        let output = eda(&["run", &file, "--backend", "cpu", "--split", split]);
        assert_refused(split, &output, &["split", "0 to 64", &file]);
    }
}

#[test]
fn output_holds_o_and_final_state_and_what_made_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.safetensors");
    let name = path.to_str().expect("a UTF-8 path");
    let output = eda(&[
        "run",
        &golden("eda_worked_example"),
        "-o",
        name,
        "--mode",
        "recurrent",
    ]);
    assert!(output.status.success());
    let bytes = std::fs::read(&path).expect("the output");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let state = file.tensor("final_state").expect("final_state");
    assert_eq!(
        (state.dtype(), state.shape()),
        (Dtype::F32, &[1, 1, 2, 1][..])
    );
    assert_eq!(state.data(), [0.0f32, 7.0].map(f32::to_le_bytes).concat());
    assert_eq!(file.tensor("o").expect("o").shape(), [1, 1, 1, 1]);
    assert_eq!(file.len(), 2);
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a header");
    let metadata = header.metadata().clone().expect("metadata");
    for (key, value) in [
        ("rule", "eda"),
        ("scale", "1"),
        ("backend", "cpu"),
        ("tier", "reference"),
    ] {
        assert_eq!(metadata[key], value);
    }

    let text = String::from_utf8_lossy(&output.stdout);
    for part in ["eda", "reference", "error", name] {
        assert!(text.contains(part), "{text}");
    }
    // As readable as a file that any other program would have made.
    let other = folder.path().join("other");
    std::fs::write(&other, "").expect("a written file");
    let permissions = |path: &Path| std::fs::metadata(path).expect("metadata").permissions();
    assert_eq!(permissions(&path), permissions(&other));
}

#[test]
fn a_run_that_fails_leaves_an_existing_output_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let bad = folder.path().join("bad.safetensors");
    let draft = Draft::of("eda_odd_sizes").value("g", 0, 1.0);
    std::fs::write(&bad, draft.bytes()).expect("a written file");
    let out = folder.path().join("out.safetensors");
    std::fs::write(&out, "precious").expect("a written file");
    let output = eda(&[
        "run",
        bad.to_str().expect("a UTF-8 path"),
        "-o",
        out.to_str().expect("a UTF-8 path"),
    ]);
    assert_refused("positive g", &output, &["`g`"]);
    assert_eq!(std::fs::read(&out).expect("the output"), b"precious");
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 2, "a temporary file was left behind");
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder_name = folder.path().to_str().expect("a UTF-8 path");
    let file = folder.path().join("in.safetensors");
    std::fs::copy(golden("eda_basic"), &file).expect("a copy");
    let input = file.to_str().expect("a UTF-8 path");
    let run = |out: &str| eda(&["run", input, "--mode", "recurrent", "-o", out]);
    let nowhere = format!("{folder_name}/no/such/folder.safetensors");
    assert_refused("no folder", &run(&nowhere), &[&nowhere, "cannot write"]);
    assert_refused(
        "a folder",
        &run(folder_name),
        &[folder_name, "regular file"],
    );
    let locked = folder.path().join("locked.safetensors");
    std::fs::write(&locked, "precious").expect("a written file");
    let mut permissions = locked.metadata().expect("metadata").permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&locked, permissions).expect("a locked file");
    let locked_name = locked.to_str().expect("a UTF-8 path");
    assert_refused(
        "a read-only file",
        &run(locked_name),
        &[locked_name, "read-only"],
    );
    assert_eq!(std::fs::read(&locked).expect("the file"), b"precious");
    let before = std::fs::read(&file).expect("the input");
    assert_refused("the input", &run(input), &[input, "found the input"]);
    assert_eq!(std::fs::read(&file).expect("the input"), before);
    #[cfg(unix)]
    {
        // Renaming over a device would replace it.
        assert_refused(
            "a device",
            &run("/dev/null"),
            &["/dev/null", "regular file"],
        );
        let link = folder.path().join("link.safetensors");
        let target = folder.path().join("target.safetensors");
        std::fs::write(&target, "").expect("a written file");
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        assert!(run(link.to_str().expect("a UTF-8 path")).status.success());
        assert!(link.is_symlink() && target.metadata().expect("metadata").len() > 0);
        // A link to nothing, or to a pipe, as /dev/stdout is: renaming would replace the link.
        let dangling = folder.path().join("dangling.safetensors");
        std::os::unix::fs::symlink(folder.path().join("none"), &dangling).expect("a link");
        let pipe = folder.path().join("pipe.safetensors");
        std::os::unix::fs::symlink("/proc/self/fd/1", &pipe).expect("a link");
        for link in [dangling, pipe] {
            let name = link.to_str().expect("a UTF-8 path");
            assert_refused("a link", &run(name), &[name, "a link that leads to none"]);
            assert!(link.is_symlink());
        }
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    for args in [
        vec!["run", "IN", "--mode", "recurrent"],
        vec!["run", "IN", "--mode", "recurrent", "--json"],
        vec!["--help"],
    ] {
        let file = golden("eda_worked_example");
        let args = args.iter().map(|&a| if a == "IN" { &file } else { a });
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = Command::new(env!("CARGO_BIN_EXE_eda"))
            .args(args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .expect("the program runs");
        assert!(output.status.success());
        assert!(
            output.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn command_line_overrides_the_file() {
    let file = golden("kda_basic");
    let report = json(&eda(&[
        "run",
        &file,
        "--mode",
        "recurrent",
        "--json",
        "--scale",
        "-0.5",
    ]));
    let scaled = errors(&report);
    // o is linear in the scale; the file's is 32^-1/2.
    let expected = 1.0 + 0.5 * 32f64.sqrt();
    assert!(
        (scaled[0] - expected).abs() < 1e-6 && scaled[1] < 1e-9,
        "{scaled:?}"
    );
    // Unit keys change little when normalised, yet they do.
    let report = json(&eda(&[
        "run",
        &file,
        "--mode",
        "recurrent",
        "--json",
        "--normalize",
    ]));
    assert!(errors(&report)[0] > 1e-9);
    let output = eda(&["run", &file, "--mode", "recurrent", "--rule", "eda"]);
    assert_refused("kda as eda", &output, &["`e`", "no such tensor"]);
    let output = eda(&["run", &file, "--mode", "recurrent", "--rule", "delta"]);
    assert_refused("kda as delta", &output, &["`g`", "rule delta", "extra"]);
}
