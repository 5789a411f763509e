//! The file reader against files that mean harm: whatever the bytes, it returns, and it never asks for
//! much more memory than the file is long.

use eda_wgpu::Error;
use eda_wgpu::file::{self, ReadOptions};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Cursor;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, watched: the largest single request, and the most held at once.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST_HELD: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    LARGEST.fetch_max(bytes, Relaxed);
    MOST_HELD.fetch_max(HELD.fetch_add(bytes, Relaxed) + bytes, Relaxed);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grow(size);
        HELD.fetch_sub(layout.size(), Relaxed);
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// splitmix64: the same files in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n` (0 where `n` is 0).
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A file in its two parts, so that a changed header still gets a right length.
#[derive(Clone)]
struct Parts {
    header: Vec<u8>,
    data: Vec<u8>,
}

impl Parts {
    fn of(bytes: &[u8]) -> Self {
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Self {
            header: bytes[8..8 + n].to_vec(),
            data: bytes[8 + n..].to_vec(),
        }
    }

    fn join(&self) -> Vec<u8> {
        let mut bytes = (self.header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(&self.header);
        bytes.extend(&self.data);
        bytes
    }
}

/// Small files that take every path of the reader: raw inputs, packed sequences, each element type.
fn small_files() -> Vec<Vec<u8>> {
    let make = |metadata: &[(&str, &str)], tensors: &[(&str, &str, &[usize])]| {
        let mut header = serde_json::Map::new();
        let metadata: serde_json::Map<_, _> = metadata
            .iter()
            .map(|&(key, value)| (key.to_string(), value.into()))
            .collect();
        header.insert("__metadata__".into(), metadata.into());
        let mut at = 0;
        for &(name, dtype, shape) in tensors {
            let size = match dtype {
                "F16" | "BF16" => 2,
                "F64" | "I64" => 8,
                _ => 4,
            };
            let end = at + size * shape.iter().product::<usize>();
            header.insert(
                name.into(),
                serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}),
            );
            at = end;
        }
        Parts {
            header: serde_json::to_vec(&header).unwrap(),
            data: vec![0; at],
        }
        .join()
    };
    vec![
        make(
            &[
                ("rule", "eda"),
                ("raw", "true"),
                ("lower_bound", "-5"),
                ("decay_gate", "safe"),
            ],
            &[
                ("q", "F16", &[1, 2, 1, 3]),
                ("k", "BF16", &[1, 2, 1, 3]),
                ("e", "F64", &[1, 2, 1, 3]),
                ("v", "F32", &[1, 2, 2, 2]),
                ("a", "F32", &[1, 2, 2, 3]),
                ("A_log", "F32", &[2]),
                ("dt_bias", "F64", &[2, 3]),
                ("beta_logit", "F16", &[1, 2, 2]),
                ("gamma_logit", "F32", &[1, 2, 2]),
                ("expected_g", "F64", &[1, 2, 2, 3]),
                ("expected_o", "F16", &[1, 2, 2, 2]),
            ],
        ),
        make(
            &[("rule", "delta"), ("scale", "0.5")],
            &[
                ("q", "F32", &[1, 0, 1, 1]),
                ("k", "F32", &[1, 0, 1, 1]),
                ("v", "F32", &[1, 0, 1, 1]),
                ("beta", "F32", &[1, 0, 1]),
                ("initial_state", "F32", &[2, 1, 1, 1]),
                ("cu_seqlens", "I64", &[3]),
            ],
        ),
        make(
            &[("rule", "deltaproduct"), ("householders", "2")],
            &[
                ("q", "F32", &[2, 1, 1, 2]),
                ("k", "F32", &[2, 2, 1, 2]),
                ("v", "F32", &[2, 2, 1, 2]),
                ("g", "F32", &[2, 1, 1]),
                ("beta", "F32", &[2, 2, 1]),
                ("expected_final_state", "F64", &[2, 1, 2, 2]),
            ],
        ),
        make(
            &[("rule", "linear")],
            &[
                ("q", "F32", &[3, 0, 1, 2]),
                ("k", "F32", &[3, 0, 1, 2]),
                ("v", "F32", &[3, 0, 1, 2]),
            ],
        ),
    ]
}

const NUMBERS: &[&str] = &[
    "0",
    "1",
    "2",
    "3",
    "-1",
    "64",
    "256",
    "257",
    "65536",
    "4294967296",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "1.5",
    "null",
    "\"1\"",
    "[]",
    "1e-400",
];
const WORDS: &[&str] = &[
    "F32",
    "F16",
    "BF16",
    "F64",
    "I32",
    "I64",
    "U8",
    "BOOL",
    "F8_E4M3",
    "q",
    "k",
    "v",
    "e",
    "g",
    "a",
    "b",
    "p",
    "w",
    "beta",
    "gamma",
    "beta_logit",
    "gamma_logit",
    "A_log",
    "dt_bias",
    "initial_state",
    "cu_seqlens",
    "expected_o",
    "expected_g",
    "expected_final_state",
    "__metadata__",
    "rule",
    "eda",
    "kda",
    "gdn",
    "gdn2",
    "rwkv7",
    "comba",
    "linear",
    "deltaproduct",
    "householders",
    "scale",
    "raw",
    "true",
    "false",
    "lower_bound",
    "decay_gate",
    "sigmoid",
    "softplus",
    "allow_neg_eigval",
    "inf",
    "NaN",
    "-0",
    "",
    "\\u0000",
    "\\ud800",
    "\u{202e}",
    "dtype",
    "shape",
    "data_offsets",
];

/// Runs of bytes in `header` that `is` holds for.
fn runs(header: &[u8], is: impl Fn(u8) -> bool) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    let mut start = None;
    for (i, &b) in header.iter().chain([&b' ']).enumerate() {
        match (is(b), start) {
            (true, None) => start = Some(i),
            (false, Some(s)) => {
                found.push(s..i);
                start = None;
            }
            _ => {}
        }
    }
    found
}

fn mutate(parts: &mut Parts, others: &[Parts], random: &mut Random) {
    let Parts { header, data } = parts;
    let at = random.below(header.len());
    match random.below(16) {
        0 if !header.is_empty() => header[at] ^= 1 << random.below(8),
        1 if !data.is_empty() => {
            let at = random.below(data.len());
            data[at] ^= 1 << random.below(8);
        }
        2 => header.truncate(at),
        3 => data.truncate(random.below(data.len())),
        4 => data.extend(std::iter::repeat_n(0, random.below(64))),
        5..=7 => {
            let numbers = runs(header, |b| b.is_ascii_digit());
            if !numbers.is_empty() {
                let run = numbers[random.below(numbers.len())].clone();
                header.splice(run, random.of(NUMBERS).bytes());
            }
        }
        8..=9 => {
            let words = runs(header, |b| b.is_ascii_alphabetic() || b == b'_');
            if !words.is_empty() {
                let run = words[random.below(words.len())].clone();
                header.splice(run, random.of(WORDS).bytes());
            }
        }
        10 => {
            // The front of one header and the back of another.
            let other = &others[random.below(others.len())].header;
            header.truncate(at);
            header.extend(&other[random.below(other.len())..]);
        }
        11 => {
            // A piece again, as of a repeated key.
            let len = random.below(80).min(header.len() - at);
            let piece = header[at..at + len].to_vec();
            let to = random.below(header.len());
            header.splice(to..to, piece);
        }
        12 => {
            let len = random.below(40).min(header.len() - at);
            header.drain(at..at + len);
        }
        13 => {
            let (open, n) = (
                random.of(&[b'[', b'{', b'"', b'-', 0xff]),
                random.below(300),
            );
            header.splice(at..at, std::iter::repeat_n(open, n));
        }
        14 if data.len() >= 8 => {
            // Values that are not finite, offsets that go back or are negative.
            let at = random.below(data.len() - 7) & !3;
            let word = random.of(&[
                f32::NAN.to_bits(),
                f32::INFINITY.to_bits(),
                f32::NEG_INFINITY.to_bits(),
                1.0f32.to_bits(),
                u32::MAX,
                3,
                0,
            ]);
            data[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        15 => {
            // A shape of many dimensions, which would grow in memory.
            let shape = "0,".repeat(random.below(2000));
            let numbers = runs(header, |b| b == b'[');
            if !numbers.is_empty() {
                let run = numbers[random.below(numbers.len())].clone();
                header.splice(run.end..run.end, shape.bytes());
            }
        }
        _ => {}
    }
}

#[test]
fn mutated_files_are_read_or_refused() {
    const FILES: usize = 400_000;
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden");
    let mut starts = small_files();
    for bytes in &starts {
        let read = file::read_from(
            Cursor::new(bytes),
            bytes.len() as u64,
            Path::new("small"),
            &ReadOptions::default(),
        );
        assert!(read.is_ok(), "{:?}", read.err());
    }
    let small = starts.len() + 2;
    for name in [
        "eda_worked_example",
        "eda_odd_sizes",
        "eda_varlen",
        "eda_raw_layer_inputs",
        "deltaproduct_basic",
        "rwkv7_basic",
    ] {
        starts.push(std::fs::read(golden.join(format!("{name}.safetensors"))).unwrap());
    }
    let starts: Vec<Parts> = starts.iter().map(|bytes| Parts::of(bytes)).collect();

    let mut random = Random(0x5eed);
    // Read; then refused as Tensor, Unsupported, File.
    let mut seen = [0usize; 4];
    for i in 0..FILES {
        // The large files teach the same as the small ones, more slowly.
        let choices = if i % 100 == 0 { starts.len() } else { small };
        let mut parts = starts[random.below(choices)].clone();
        for _ in 0..1 + random.below(3) {
            mutate(&mut parts, &starts, &mut random);
        }
        let mut bytes = parts.join();
        match random.below(12) {
            0 => {
                let length = match random.below(4) {
                    0 => u64::MAX,
                    1 => bytes.len() as u64,
                    2 => 1 << random.below(64),
                    _ => random.next() % 1000,
                };
                bytes[..8].copy_from_slice(&length.to_le_bytes());
            }
            1 => bytes.truncate(random.below(bytes.len())),
            2 => {
                let at = random.below(bytes.len());
                bytes[at] = random.next() as u8;
            }
            _ => {}
        }
        // Now and then the file has become shorter since its length was asked for.
        let length = bytes.len() + if i % 50 == 0 { random.below(100) } else { 0 };
        let options = ReadOptions {
            normalize: random.below(2) == 0,
            allow_non_finite: random.below(4) == 0,
            rule: (random.below(8) == 0).then(|| random.of(WORDS).to_string()),
            scale: None,
        };

        LARGEST.store(0, Relaxed);
        let held = HELD.load(Relaxed);
        MOST_HELD.store(held, Relaxed);
        let read = file::read_from(
            Cursor::new(&bytes),
            length as u64,
            Path::new("fuzz.safetensors"),
            &options,
        );
        let limit = 8 * bytes.len() + (1 << 20);
        let (largest, most) = (LARGEST.load(Relaxed), MOST_HELD.load(Relaxed) - held);
        assert!(
            largest <= limit,
            "file {i}: {largest} of {limit} bytes at once"
        );
        assert!(most <= limit, "file {i}: {most} of {limit} bytes in all");

        match read {
            Ok(input) => {
                seen[0] += 1;
                let slices = input.tensors.slices();
                input
                    .problem
                    .validate_host(&slices, options.allow_non_finite)
                    .unwrap();
                assert!(input.problem.states_len() < usize::MAX / 8);
            }
            Err(error) => {
                seen[match error {
                    Error::Tensor { .. } => 1,
                    Error::Unsupported { .. } => 2,
                    Error::File { .. } => 3,
                    _ => panic!("file {i}: {error}"),
                }] += 1;
                let text = error.to_string();
                assert!(
                    text.len() < 2000 && !text.contains(char::is_control),
                    "file {i}: {text:?}"
                );
            }
        }
    }
    println!("read, tensor, unsupported, file: {seen:?}");
    // Each outcome is common enough that the mutations reach past the header.
    assert!(seen.iter().all(|&n| n > FILES / 1000), "{seen:?}");
}
