//! `eda bench` as a user meets it: the built program on tiny shapes, its JSON, and comparisons of made-up files.

use eda_wgpu::bench::report::{Case, Ceilings, Copy, Op, Product, Report, Samples, Timing};
use eda_wgpu::{Element, Problem, Rule};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The backend under test.
const BACKEND: &str = if cfg!(target_os = "macos") {
    "metal"
} else if cfg!(windows) {
    "dx12"
} else {
    "vulkan"
};

fn eda(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eda"));
    command.args(args).env("EDA_NO_CACHE", "1");
    command
}

/// Its standard output, after success.
fn output(command: &mut Command) -> String {
    let output = command.output().expect("the program runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// `eda bench` on the adapter under test.
fn bench(args: &[&str]) -> Command {
    let mut command = eda(&["bench", "--backend", BACKEND]);
    if let Ok(adapter) = std::env::var("EDA_TEST_ADAPTER") {
        command.args(["--adapter", &adapter]);
    }
    command.args(args);
    command
}

/// Status 2, nothing on stdout, one line on stderr that has each of `parts`.
fn assert_refused(command: &mut Command, parts: &[&str]) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the program runs");
    let stderr = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(2), "{command:?}: {stderr}");
    assert!(stdout.is_empty(), "{command:?}");
    assert_eq!(stderr.lines().count(), 1, "{command:?}: {stderr}");
    for part in parts {
        assert!(
            stderr.contains(part),
            "{command:?}: no `{part}` in {stderr}"
        );
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a directory")
}

fn path(folder: &tempfile::TempDir, name: &str) -> String {
    let path = folder.path().join(name);
    path.to_str().expect("a UTF-8 path").to_owned()
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a directory");
    entries.map(|e| e.expect("an entry").path()).collect()
}

fn report(path: &str) -> (Report, String) {
    let text = std::fs::read_to_string(path).expect("a file");
    let report: Report = serde_json::from_str(&text).expect("a report");
    report.check().expect("values of a run");
    (report, text)
}

#[test]
fn a_run_on_the_gpu_leaves_everything_that_was_measured() {
    let folder = folder();
    let file = path(&folder, "out.json");
    // An older file is replaced.
    std::fs::write(&file, "old").expect("written");
    let text = output(&mut bench(&[
        "--rule",
        "eda,deltaproduct",
        "--shape",
        "1,40,1,2,16,12",
        "--shape",
        "2,1,1,2,16,12",
        "--tier",
        "portable",
        "--dtype",
        "f32",
        "--chunk",
        "16",
        "--quick",
        "--json",
        &file,
    ]));
    assert_eq!(names(folder.path()).len(), 1, "no temporary file is left");
    let (report, json) = report(&file);
    for part in [
        "ceilings",
        "copy",
        "pipelines",
        "as given",
        "tokens/s",
        "GFLOP/s",
        "GB/s",
        "prefill eda 1,40,1,2,16,12 f32",
        "decode deltaproduct n=2 2,1,1,2,16,12 f32",
    ] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
    assert!(text.contains(&report.adapter.name));
    assert_eq!(report.adapter.backend, BACKEND);
    assert_eq!(report.tier, "portable");
    assert_eq!(report.crate_version, env!("CARGO_PKG_VERSION"));
    assert_eq!(report.os, std::env::consts::OS);
    assert_eq!(report.date.len(), "2026-06-30T12:00:00Z".len());
    assert!(report.date.ends_with('Z') && report.quick);
    if let Some(commit) = &report.commit {
        assert!(commit.len() >= 40, "{commit}");
    }
    assert!(report.ceilings.copy.gb_per_s > 0.0 && report.ceilings.product.gflop_per_s > 0.0);
    let pipelines = report.pipelines.as_ref().expect("a GPU has pipelines");
    // Each rule's five prefill passes, of which two are common, and decode.
    assert!(
        pipelines.count >= 8 && pipelines.first_ms > 0.0,
        "{pipelines:?}"
    );

    assert_eq!(report.cases.len(), 4);
    for case in &report.cases {
        assert!(case.final_state_written && !case.times.samples_ms.is_empty());
        assert_eq!(case.median_ms, case.times.median_ms());
        assert!(case.tokens_per_s > 0.0 && case.gflops > 0.0 && case.gbytes > 0.0);
        match case.op {
            Op::Prefill => assert_eq!((case.chunk, case.steps), (Some(16), 1)),
            Op::Decode => {
                assert_eq!(case.chunk, None);
                let Some(run) = &case.long_run else {
                    assert_eq!(case.times.timing, Timing::Wall, "a clock gives blocks");
                    continue;
                };
                assert_eq!(run.steps, run.block * 10);
                assert_eq!(run.block_ms.len(), 10);
                assert_eq!(run.first_ms, run.block_ms[0]);
            }
        }
    }
    // The same again, to the last digit.
    let again = serde_json::to_string_pretty(&report).expect("JSON");
    assert_eq!(again, json.trim_end());

    let text = output(&mut eda(&["bench", "compare", &file, &file]));
    assert!(text.contains("1.00") && !text.contains("missing"), "{text}");
}

#[test]
fn a_run_on_the_processor_has_ceilings_of_its_own() {
    let folder = folder();
    let file = path(&folder, "out.json");
    let text = output(&mut eda(&[
        "bench",
        "--backend",
        "cpu",
        "--op",
        "decode",
        "--shape",
        "2,1,1,1,8,8",
        "--dtype",
        "f16",
        "--quick",
        "--json",
        &file,
    ]));
    assert!(
        text.contains("the host's clock") && !text.contains("pipelines"),
        "{text}"
    );
    let (report, _) = report(&file);
    assert_eq!(
        (report.tier.as_str(), report.adapter.backend.as_str()),
        ("cpu", "cpu")
    );
    assert_eq!(report.pipelines, None);
    assert_eq!(report.cases.len(), 1);
    assert_eq!(report.cases[0].times.timing, Timing::Wall);
    assert_eq!(
        report.cases[0].key().to_string(),
        "decode eda 2,1,1,1,8,8 f16"
    );
}

/// Copies to a device are of whole words.
#[test]
fn an_odd_number_of_float16_values_can_be_timed() {
    for shape in ["1,1,1,1,1,1", "1,3,1,1,5,7"] {
        let text = output(&mut bench(&["--shape", shape, "--dtype", "f16", "--quick"]));
        assert!(text.contains(&format!("{shape} f16")), "{text}");
    }
}

/// Half the bytes of states, in decode alone; files without the key have float32 states.
#[test]
fn states_of_decode_may_be_stored_as_float16() {
    let folder = folder();
    let file = path(&folder, "out.json");
    let run = |state: &str| {
        let shapes = ["--shape", "1,20,1,1,16,16", "--shape", "2,1,1,2,16,16"];
        let flags = ["--quick", "--state", state, "--json", &file];
        let text = output(bench(&shapes).args(flags));
        (text, report(&file).0)
    };
    let (text, half) = run("f16");
    assert!(
        text.contains("decode eda 2,1,1,2,16,16 f32 state f16"),
        "{text}"
    );
    assert!(text.contains("prefill eda 1,20,1,1,16,16 f32 "), "{text}");
    let (_, full) = run("f32");
    assert_eq!(half.cases[0].key(), full.cases[0].key());
    assert_eq!(
        (half.cases[0].state, half.cases[1].state),
        (Element::F32, Element::F16)
    );
    assert_eq!(half.cases[0].gbytes, full.cases[0].gbytes);
    // Two rows of two heads, read and written.
    let saved = (full.cases[1].gbytes - half.cases[1].gbytes) * 1e9;
    assert!(
        (saved - 2.0 * 2.0 * 256.0 * 2.0 * 2.0).abs() < 1e-3,
        "{saved}"
    );

    let mut old = serde_json::to_value(&full).expect("JSON");
    for case in old["cases"].as_array_mut().expect("cases") {
        case.as_object_mut()
            .expect("a case")
            .remove("state")
            .expect("the key");
    }
    let old: Report = serde_json::from_value(old).expect("a report");
    assert_eq!(old, full);
    // A state of 9 values cannot be copied by four bytes.
    assert_refused(
        &mut bench(&["--shape", "1,1,1,1,3,3", "--state", "f16", "--quick"]),
        &["float16", "even"],
    );
}

#[test]
fn wrong_flags_are_refused_before_anything_runs() {
    let shape = |s: &str| {
        let mut command = eda(&["bench", "--backend", "cpu", "--shape"]);
        command.arg(s);
        command
    };
    for bad in [
        "1,2,3",
        "1,2,3,4,5,6,7",
        "0,1,1,1,8,8",
        "1,x,1,1,8,8",
        "-1,1,1,1,8,8",
        "",
        "1,1,1,1,8,99999999999999999999",
    ] {
        assert_refused(&mut shape(bad), &["--shape"]);
    }
    assert_refused(&mut shape("1,1,1,1,300,8"), &["key_dim", "300", "256"]);
    assert_refused(&mut shape("1,1,2,3,8,8"), &["heads"]);
    assert_refused(&mut shape("4000000000,4000000000,1,1,8,8"), &[]);
    for args in [
        &["--backend", "cpu", "--adapter", "x"][..],
        &["--backend", "cpu", "--tier", "portable"],
        &["--op", "decode", "--chunk", "16"],
        &["--shape", "1,1,1,1,8,8", "--chunk", "64"],
        &["--op", "prefill", "--state", "f16"],
        &["--shape", "1,9,1,1,8,8", "--state", "f16"],
        &["--shape", "1,1,1,1,8,8", "--tier", "matrix"],
        &["--backend", "cpu", "--state", "f16"],
        &["--rule", "none"],
        &["--dtype", "bf16"],
        &["--chunk", "17"],
        &["--op", "train"],
        &["--tier", "best"],
    ] {
        let flag = args
            .iter()
            .rev()
            .find(|a| a.starts_with("--"))
            .expect("a flag");
        assert_refused(eda(&["bench"]).args(args), &[flag]);
    }
    let folder = folder();
    let nowhere = path(&folder, "no/such/out.json");
    assert_refused(
        eda(&["bench", "--backend", "cpu", "--json"]).arg(&nowhere),
        &["no/such/out.json", "cannot write"],
    );
    #[cfg(unix)]
    assert_refused(
        eda(&["bench", "--backend", "cpu", "--json"]).arg(&nowhere),
        &["No such file or directory"],
    );
    let huge = shape("1,2000000000,1000,1000,256,256")
        .output()
        .expect("it runs");
    let message = String::from_utf8_lossy(&huge.stderr);
    assert_eq!(huge.status.code(), Some(1), "{message}");
    assert!(
        message.contains("out of memory") && !message.contains("GPU"),
        "{message}"
    );
    let status = eda(&[
        "bench",
        "--backend",
        BACKEND,
        "--adapter",
        "no such adapter",
    ])
    .output()
    .expect("the program runs")
    .status;
    assert_eq!(status.code(), Some(1));
}

/// The user's cache directory gets a file, unless it must not, and need not be there.
#[cfg(target_os = "linux")]
#[test]
fn pipelines_are_kept_in_the_users_cache_directory() {
    let folder = folder();
    let home = folder.path().join("cache");
    let run = |cache: &Path, disable: &str, args: &[&str]| {
        let mut command = bench(&["--shape", "1,1,1,1,4,4", "--quick"]);
        command
            .args(args)
            .env("XDG_CACHE_HOME", cache)
            .env("EDA_NO_CACHE", disable);
        let text = output(&mut command);
        let line = text
            .lines()
            .find(|l| l.starts_with("cache"))
            .expect("a line");
        line.split_once(' ').expect("words").1.trim().to_owned()
    };
    assert_eq!(run(&home, "", &["--no-cache"]), "off");
    assert_eq!(run(&home, "1", &[]), "off");
    // (A driver's own cache may be there.)
    assert!(!home.join("eda-wgpu").exists());
    // Each Vulkan adapter has it.
    assert_eq!(run(&home, "0", &[]), "kept for the next run");
    assert_eq!(names(&home.join("eda-wgpu/pipelines")).len(), 1);
    assert_eq!(
        run(&home, "", &[]),
        "pipelines of an earlier run were found"
    );
    let blocked = folder.path().join("file");
    std::fs::write(&blocked, "").expect("written");
    run(&blocked, "", &[]);
}

/// A file as `eda bench` writes it.
fn sample(name: &str, cases: &[(Op, [usize; 6], &[f64])]) -> Value {
    let times = |samples: &[f64]| Samples {
        timing: Timing::Wall,
        repetitions: 1,
        samples_ms: samples.to_vec(),
    };
    let ceilings = Ceilings {
        copy: Copy::new(1 << 20, times(&[1.0])),
        product: Product::new(128, times(&[1.0])),
    };
    let case = |&(op, shape, samples): &(Op, [usize; 6], &[f64])| {
        let problem = Problem::new(Rule::Eda, shape);
        Case::new(op, &problem, Element::F32, times(samples), &ceilings)
    };
    json!({
        "format": "eda-bench/1", "crate_version": "0.1.0", "commit": null, "date": "2026-06-30T12:00:00Z",
        "os": "linux", "arch": "x86_64", "quick": false,
        "adapter": {
            "name": name, "backend": "vulkan", "device_type": "discrete", "vendor_id": 4318, "device_id": 1,
            "driver": "d", "driver_info": "1.2"
        },
        "tier": "portable",
        "ceilings": ceilings,
        "pipelines": null,
        "cases": cases.iter().map(case).collect::<Vec<_>>(),
        "skipped": []
    })
}

const LONG: [usize; 6] = [1, 4096, 16, 16, 128, 128];
const STEP: [usize; 6] = [8, 1, 16, 16, 128, 128];

fn write(folder: &tempfile::TempDir, name: &str, text: impl ToString) -> String {
    let file = path(folder, name);
    std::fs::write(&file, text.to_string()).expect("written");
    file
}

#[test]
fn comparisons_show_ratios_and_what_is_missing() {
    let folder = folder();
    let a = write(
        &folder,
        "a.json",
        sample(
            "Card A",
            &[
                (Op::Prefill, LONG, &[2.0, 4.0, 3.0]),
                (Op::Decode, STEP, &[0.01]),
            ],
        ),
    );
    let b = write(
        &folder,
        "b.json",
        sample("Card B", &[(Op::Prefill, LONG, &[6.0])]),
    );
    let c = write(
        &folder,
        "c.json",
        sample(
            "Card <C> & \"co\" | \u{1} \u{202e}\u{2028}\u{fffe}",
            &[
                (Op::Decode, STEP, &[0.005, 0.015]),
                (Op::Decode, LONG, &[5e3]),
            ],
        ),
    );
    let text = output(&mut eda(&["bench", "compare", &a, &b, &c]));
    let row = |start: &str| -> Vec<String> {
        let line = text
            .lines()
            .find(|l| l.starts_with(start))
            .unwrap_or_else(|| panic!("{start}: {text}"));
        let cells = line[start.len()..].split("  ").map(|s| s.trim().to_owned());
        cells.filter(|s| !s.is_empty()).collect()
    };
    assert_eq!(
        row("prefill eda 1,4096,16,16,128,128 f32"),
        ["3.00 ms", "6.00 ms", "missing", "2.00", "-"]
    );
    assert_eq!(
        row("decode eda 8,1,16,16,128,128 f32"),
        ["10.0 us", "missing", "10.0 us", "-", "1.00"]
    );
    assert_eq!(
        row("decode eda 1,4096,16,16,128,128 f32"),
        ["missing", "missing", "5.00 s", "-", "-"]
    );
    for part in [
        "[0] Card A (vulkan, discrete, tier portable)",
        "[1] / [0]",
        "[2] / [0]",
    ] {
        assert!(text.contains(part), "{text}");
    }

    let picture = path(&folder, "all.svg");
    let text = output(&mut eda(&[
        "bench",
        "compare",
        &a,
        &b,
        &c,
        "--markdown",
        "--svg",
        &picture,
    ]));
    assert!(
        text.contains(
            "| prefill eda 1,4096,16,16,128,128 f32 | 3.00 ms | 6.00 ms | missing | 2.00 | - |"
        ),
        "{text}"
    );
    assert!(text.contains("Card \\<C\\> & \"co\" \\|"), "{text}");
    let hidden = ['\u{1}', '\u{202e}', '\u{2028}', '\u{fffe}'];
    assert!(!text.contains(hidden), "{text:?}");
    assert_eq!(names(folder.path()).len(), 4, "no temporary file is left");

    let svg = std::fs::read_to_string(&picture).expect("a picture");
    assert!(!svg.contains(hidden));
    let document = roxmltree::Document::parse(&svg).expect("XML");
    assert_eq!(document.root_element().tag_name().name(), "svg");
    let texts: Vec<String> = document
        .descendants()
        .filter(|n| n.has_tag_name(("http://www.w3.org/2000/svg", "text")))
        .map(|n| n.text().unwrap_or_default().trim().to_owned())
        .collect();
    for part in [
        "Card A",
        "Card B",
        "Card <C> & \"co\" |",
        "prefill eda 1,4096,16,16,128,128 f32",
        "3.00 ms",
        "6.00 ms (2.00 x)",
        "not in this file",
        "time, logarithmic",
        "1 s",
    ] {
        assert!(
            texts.iter().any(|t| t.contains(part)),
            "no `{part}` in {texts:?}"
        );
    }
    assert!(svg.contains("prefers-color-scheme:dark"));
    // Longer times, longer bars; all of them on the page.
    let number = |n: &roxmltree::Node<'_, '_>, name: &str| -> f64 {
        n.attribute(name)
            .and_then(|x| x.parse().ok())
            .unwrap_or(0.0)
    };
    let page = number(&document.root_element(), "width");
    let bars: Vec<f64> = document
        .descendants()
        .filter(|n| {
            n.has_tag_name(("http://www.w3.org/2000/svg", "rect"))
                && n.parent().is_some_and(|p| p.tag_name().name() == "g")
        })
        .map(|n| {
            assert!(number(&n, "x") + number(&n, "width") < page);
            number(&n, "width")
        })
        .collect();
    assert_eq!(bars.len(), 5);
    assert!(
        bars[0] < bars[1] && bars[1] < bars[4] && bars[2] == bars[3] && bars[2] > 0.0,
        "{bars:?}"
    );

    // One file alone is a table too.
    let text = output(&mut eda(&["bench", "compare", &b]));
    assert!(text.contains("6.00 ms") && !text.contains(" / "), "{text}");
}

/// Reports that are shipped, some of them of earlier versions.
#[test]
fn reports_in_this_repository_are_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = names(&root.join("web/page/results"));
    if let Ok(entries) = std::fs::read_dir(root.join("benches/results")) {
        files.extend(entries.map(|e| e.expect("an entry").path()));
    }
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    assert!(!files.is_empty());
    output(eda(&["bench", "compare"]).args(files));
}

/// Cases are looked up, not searched: with a search in each file for each case this took minutes.
#[test]
fn many_cases_are_compared_in_little_time() {
    let folder = folder();
    let shapes = (1..=20_000).map(|tokens| [1, tokens, 1, 1, 8, 8]);
    let cases: Vec<(Op, [usize; 6], &[f64])> = shapes
        .map(|shape| (Op::Prefill, shape, &[1.0][..]))
        .collect();
    let file = write(&folder, "many.json", sample("Card", &cases));
    let picture = path(&folder, "many.svg");
    let begun = std::time::Instant::now();
    let mut compare = eda(&["bench", "compare", &file, &file, "--svg", &picture]);
    assert_eq!(output(&mut compare).matches("1.00 ms").count(), 40_000);
    assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
}

#[test]
fn files_that_are_no_reports_are_refused_with_file_and_key() {
    let folder = folder();
    let good = || {
        sample(
            "Card",
            &[(Op::Prefill, LONG, &[1.0, 2.0]), (Op::Decode, STEP, &[0.5])],
        )
    };
    let with = |pointer: &str, value: Value| {
        let mut file = good();
        *file
            .pointer_mut(pointer)
            .unwrap_or_else(|| panic!("{pointer}")) = value;
        file.to_string()
    };
    let without = |pointer: &str, key: &str| {
        let mut file = good();
        let object = file.pointer_mut(pointer).and_then(Value::as_object_mut);
        object.and_then(|o| o.remove(key)).expect("that key");
        file.to_string()
    };
    let first = "/cases/0/times/samples_ms/0";
    let text = good().to_string();
    let sampled = |number: &str| {
        text.replacen(
            "\"samples_ms\":[1.0,2.0]",
            &format!("\"samples_ms\":[{number},2.0]"),
            1,
        )
    };
    assert_ne!(sampled("7"), text);
    let run = |steps: usize, blocks: &[f64]| json!({"steps": steps, "block": 1, "block_ms": blocks, "first_ms": 0.5, "last_ms": 0.5});
    let mut twice = good();
    twice["cases"][1] = twice["cases"][0].clone();
    let cases: Vec<(String, &[&str])> = vec![
        (String::new(), &["eda bench --json"]),
        ("not JSON".into(), &["eda bench --json"]),
        ("{not JSON}".into(), &["key must be a string"]),
        ("[]".into(), &["eda bench --json"]),
        ("{}".into(), &["format"]),
        ("null".into(), &["eda bench --json"]),
        (text[..text.len() / 2].into(), &["EOF"]),
        (format!("{text} x"), &["trailing"]),
        ("[".repeat(100_000), &["eda bench --json"]),
        (
            with("/format", json!("eda-bench/2")),
            &["`format`", "eda-bench/1", "eda-bench/2"],
        ),
        (with("/format", json!(1)), &["`format`"]),
        (without("", "cases"), &["cases"]),
        (without("", "ceilings"), &["ceilings"]),
        (without("/cases/1", "op"), &["cases[1]", "op"]),
        (
            without("/cases/0/times", "samples_ms"),
            &["cases[0].times", "samples_ms"],
        ),
        (with("/cases", json!([])), &["`cases`", "at least one"]),
        (with("/cases", json!({})), &["`cases`"]),
        (
            with("/cases/0/times/samples_ms", json!([])),
            &["`cases[0].times.samples_ms`"],
        ),
        (
            with(first, json!(-1.0)),
            &["`cases[0].times.samples_ms[0]`", "-1"],
        ),
        (with(first, json!(0.0)), &["`cases[0].times.samples_ms[0]`"]),
        (
            with(first, json!(1e12)),
            &["`cases[0].times.samples_ms[0]`", "1000000000000"],
        ),
        (
            with(first, json!(null)),
            &["cases[0].times.samples_ms[0]", "null"],
        ),
        (
            with(first, json!("1")),
            &["cases[0].times.samples_ms[0]", "string"],
        ),
        (sampled("NaN"), &["cases[0].times.samples_ms[0]"]),
        (
            sampled("1e999"),
            &["cases[0].times.samples_ms[0]", "out of range"],
        ),
        (
            with("/cases/0/rule", json!("x\ny")),
            &["`cases[0].rule`", "eda"],
        ),
        (with("/cases/0/factors", json!(2)), &["`cases[0].factors`"]),
        (with("/cases/0/shape", json!([1, 2])), &["cases[0].shape"]),
        (with("/cases/0/shape/3", json!(0)), &["`cases[0].shape[3]`"]),
        (with("/cases/0/shape/3", json!(-1)), &["cases[0].shape[3]"]),
        (with("/cases/0/state", json!("f16")), &["`cases[0].state`"]),
        (with("/cases/1/state", json!("f16")), &["`cases[1].gbytes`"]),
        (with("/cases/1/state", json!("f8")), &["cases[1].state"]),
        (with("/cases/0/dtype", json!("f8")), &["cases[0].dtype"]),
        (
            with("/cases/0/median_ms", json!(-3.0)),
            &["`cases[0].median_ms`"],
        ),
        (
            with("/cases/0/median_ms", json!(1.6)),
            &["`cases[0].median_ms`", "1.5"],
        ),
        (with("/cases/1/min_ms", json!(0.1)), &["`cases[1].min_ms`"]),
        (with("/cases/1/max_ms", json!(0.6)), &["`cases[1].max_ms`"]),
        (with("/cases/0/gflops", json!(-1.0)), &["`cases[0].gflops`"]),
        (with("/cases/0/gbytes", json!(1.0)), &["`cases[0].gbytes`"]),
        (
            with("/cases/0/tokens_per_s", json!(1.0)),
            &["`cases[0].tokens_per_s`"],
        ),
        (
            with("/cases/0/gflop_per_s", json!(0.0)),
            &["`cases[0].gflop_per_s`"],
        ),
        (
            with("/cases/0/gb_per_s", json!(1.0)),
            &["`cases[0].gb_per_s`"],
        ),
        (
            with("/cases/0/share_of_copy", json!(-0.5)),
            &["`cases[0].share_of_copy`", "-0.5"],
        ),
        (
            with("/cases/0/share_of_product", json!(2.0)),
            &["`cases[0].share_of_product`"],
        ),
        (
            with("/cases/0/chunk", json!(7)),
            &["`cases[0].chunk`", "16", "7"],
        ),
        (with("/cases/1/chunk", json!(16)), &["`cases[1].chunk`"]),
        (
            with("/cases/0/segments", json!(65)),
            &["`cases[0].segments`", "64", "65"],
        ),
        (
            with("/cases/1/segments", json!(2)),
            &["`cases[1].segments`", "0 in decode", "2"],
        ),
        (
            with("/cases/0/tier", json!("best")),
            &["`cases[0].tier`", "matrix", "best"],
        ),
        (
            with("/cases/1/tier", json!("portable")),
            &["`cases[1].tier`", "decode"],
        ),
        (
            with("/cases/0/tier", json!("matrix")),
            &["`tier`", "matrix", "portable"],
        ),
        (with("/tier", json!("best")), &["`tier`", "best"]),
        (
            with("/cases/0/shape/1", json!(4_000_000_000u64)),
            &["`cases[0].shape`", "4000000000", "2147483648"],
        ),
        (with("/cases/0/steps", json!(2)), &["`cases[0].steps`"]),
        (with("/cases/0/shape/2", json!(3)), &["`cases[0].shape`"]),
        (
            with("/cases/0/shape/4", json!(300)),
            &["`cases[0].shape`", "256"],
        ),
        (
            with("/cases/0/final_state_written", json!(false)),
            &["`cases[0].final_state_written`"],
        ),
        (
            with("/cases/0/warm_up_ms", json!(-1.0)),
            &["`cases[0].warm_up_ms`"],
        ),
        (
            with("/cases/1/long_run", run(3, &[0.5, 0.5])),
            &["`cases[1].long_run.steps`"],
        ),
        (
            with("/cases/1/long_run", run(2, &[0.5, 0.6])),
            &["`cases[1].long_run.last_ms`"],
        ),
        (
            with("/cases/0/long_run", run(2, &[0.5, 0.5])),
            &["`cases[0].long_run`"],
        ),
        (
            with("/cases/1/long_run", run(0, &[])),
            &["`cases[1].long_run.block_ms`"],
        ),
        (with("/commit", json!("")), &["`commit`"]),
        (with("/commit", json!("main")), &["`commit`", "`main`"]),
        (with("/date", json!("yesterday")), &["`date`", "yesterday"]),
        (with("/date", json!("2026-02-30T12:00:00Z")), &["`date`"]),
        (
            with("/ceilings/copy/bytes", json!(0)),
            &["`ceilings.copy.gb_per_s`"],
        ),
        (
            with("/ceilings/copy/gb_per_s", json!(0.0)),
            &["`ceilings.copy.gb_per_s`"],
        ),
        (
            with("/ceilings/product/median_ms", json!(2.0)),
            &["`ceilings.product.median_ms`"],
        ),
        (
            with("/ceilings/copy/times/samples_ms", json!([])),
            &["`ceilings.copy.times.samples_ms`"],
        ),
        (
            with("/ceilings/product/gflop_per_s", json!(-1.0)),
            &["`ceilings.product.gflop_per_s`"],
        ),
        (twice.to_string(), &["`cases[1]`", "a second prefill eda"]),
    ];
    let right = write(&folder, "right.json", good());
    let picture = path(&folder, "no.svg");
    for (text, parts) in cases {
        let bad = write(&folder, "bad.json", &text);
        let mut all = vec!["bad.json"];
        all.extend(parts);
        assert_refused(
            &mut eda(&["bench", "compare", &right, &bad, "--svg", &picture]),
            &all,
        );
        assert!(!Path::new(&picture).exists());
    }
    // A byte order mark is left out of account.
    let marked = write(&folder, "marked.json", format!("\u{feff}{}", good()));
    output(&mut eda(&["bench", "compare", &right, &marked]));
    std::fs::write(path(&folder, "bad.json"), [0xff, 0xfe, b'{']).expect("written");
    assert_refused(
        &mut eda(&["bench", "compare", &path(&folder, "bad.json")]),
        &["bad.json"],
    );
    assert_refused(
        &mut eda(&["bench", "compare", &path(&folder, "none.json")]),
        &["none.json"],
    );
    assert_refused(
        &mut eda(&["bench", "compare", folder.path().to_str().expect("UTF-8")]),
        &[],
    );
    assert_refused(&mut eda(&["bench", "compare"]), &["FILE"]);
    assert_refused(
        &mut eda(&[
            "bench",
            "compare",
            &right,
            "--svg",
            &path(&folder, "no/such.svg"),
        ]),
        &["no/such.svg"],
    );
    let before = std::fs::read(&right).expect("a file");
    assert_refused(
        &mut eda(&["bench", "compare", &right, "--svg", &right]),
        &["right.json", "found the input"],
    );
    assert_eq!(std::fs::read(&right).expect("a file"), before);
    let nine: Vec<&str> = std::iter::repeat_n(right.as_str(), 9).collect();
    assert_refused(
        eda(&["bench", "compare", "--svg", &picture]).args(nine),
        &["--svg", "8"],
    );
}
