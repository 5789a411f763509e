//! Every shader that a call can ask for: each pass, for each rule and form of the inputs, element type, chunk
//! size and way of binding. Used by the translation test and by `examples/shaders.rs`.
#![allow(dead_code, reason = "each of them uses a part of it")]

use eda_wgpu::gpu::matrix::MatrixUnits;
use eda_wgpu::gpu::plan::CHUNK_SIZES;
use eda_wgpu::gpu::shaders::{self, Access, Binding, ChunkShape, Pass, Variant};
use eda_wgpu::rule::DecayKind;
use eda_wgpu::{Decay, DecayGate, Element, GateForm, Problem, Rule};
use std::collections::HashSet;

/// A pass as it is built for some problem.
pub struct Entry {
    /// What it is for.
    pub problem: Problem,
    /// Which pass.
    pub pass: Pass,
    /// Which text.
    pub variant: Variant,
    /// Override constants.
    pub constants: Vec<(&'static str, f64)>,
    /// Bounds of the loops that are written out.
    pub loops: Vec<(&'static str, usize)>,
}

impl Entry {
    /// Name of the text: entries with the same name have the same WGSL.
    pub fn text_name(&self) -> String {
        let flag = |on: bool, name: &'static str| if on { name } else { "" };
        let element = match self.variant.element {
            Element::F32 => "f32",
            Element::F16 => "f16",
        };
        format!(
            "{}{}-{element}{}{}{}{}{}",
            self.pass.name(),
            match self.variant.edge {
                0 => String::new(),
                edge => format!("-{edge}"),
            },
            flag(self.variant.state == Element::F16, "-state16"),
            flag(self.variant.second, "-second"),
            flag(self.variant.gates, "-gates"),
            flag(self.variant.shared, "-shared"),
            flag(self.variant.by_four, "-four")
        )
    }

    /// The WGSL text.
    pub fn source(&self) -> String {
        shaders::source(self.pass, self.variant)
    }

    /// The WGSL text as GPUs get it, its marked loops written out.
    pub fn unrolled(&self) -> String {
        shaders::unroll(&self.source(), &self.loops)
    }

    /// Whether it stores float16.
    pub fn has_half(&self) -> bool {
        [self.variant.element, self.variant.state].contains(&Element::F16)
    }

    /// Storage buffers that it binds.
    pub fn storage_buffers(&self) -> usize {
        shaders::bindings(self.pass, self.variant)
            .iter()
            .filter(|(_, access)| *access != Access::Uniform)
            .count()
    }
}

/// Every rule, DeltaProduct with one, few and the most factors.
fn rules() -> Vec<Rule> {
    let mut rules = Rule::ALL.to_vec();
    rules.extend([1, 3, 16].map(|factors| Rule::DeltaProduct { factors }));
    rules
}

/// The forms in which a rule's inputs may come; the first is the prepared one.
fn forms(rule: Rule, sizes: [usize; 6]) -> Vec<Problem> {
    let prepared = Problem::new(rule, sizes);
    let mut normalized = prepared.clone();
    normalized.normalize = true;
    let mut out = vec![prepared.clone(), normalized];
    if rule.update().decay == DecayKind::Channel {
        let mut per_head = prepared.clone();
        per_head.decay_per_head = true;
        out.push(per_head);
    }
    for (gate, beta, gamma) in [
        (
            DecayGate::Safe { lower_bound: -5.0 },
            GateForm::Sigmoid,
            GateForm::Sigmoid,
        ),
        (
            DecayGate::Sigmoid { lower_bound: -5.0 },
            GateForm::TwiceSigmoid,
            GateForm::Value,
        ),
        (DecayGate::Softplus, GateForm::Value, GateForm::TwiceSigmoid),
    ] {
        let mut raw = prepared.clone();
        raw.normalize = true;
        raw.decay = Decay::Gate(gate);
        (raw.beta, raw.gamma) = (beta, gamma);
        out.push(raw);
    }
    out
}

/// Matrix units with the limits of a device that has them: of a large GPU, and of a software driver.
pub fn matrix_devices() -> [(MatrixUnits, wgpu::Limits); 2] {
    [(16, 32, 49_152), (8, 8, 32_768)].map(|(edge, subgroup, memory)| {
        let limits = wgpu::Limits {
            max_compute_workgroup_storage_size: memory,
            max_compute_invocations_per_workgroup: 1024,
            ..wgpu::Limits::default()
        };
        (MatrixUnits { edge, subgroup }, limits)
    })
}

/// Whether a pass can be asked for on slices that share a buffer with what it writes.
fn can_share(pass: Pass, variant: Variant) -> bool {
    let list = shaders::bindings(pass, variant);
    // The table of chunks is always a buffer of its own.
    let storage = list
        .iter()
        .filter(|(binding, access)| *access != Access::Uniform && *binding != Binding::Table);
    storage.count() > 1
}

/// Every entry of the portable tier and of decode, each once.
pub fn entries() -> Vec<Entry> {
    list(false)
}

/// Every entry of the matrix tier, each once.
pub fn matrix_entries() -> Vec<Entry> {
    list(true)
}

fn list(matrix_tier: bool) -> Vec<Entry> {
    let mut seen = HashSet::new();
    let mut out = Vec::new();
    let mut add = |pass: Pass, problem: &Problem, shape: Option<&ChunkShape>| {
        let matrix = shape.and_then(|s| s.matrix.as_ref());
        let edge = matrix.map_or(0, |m| m.units.edge);
        let all = [Element::F32, Element::F16];
        let states = if pass == Pass::Decode {
            &all[..]
        } else {
            &all[..1]
        };
        for (element, &state) in all
            .into_iter()
            .flat_map(|e| states.iter().map(move |s| (e, s)))
        {
            for (shared, by_four) in [(false, false), (true, false), (false, true), (true, true)] {
                let mut variant = shaders::variant(pass, problem, element, edge);
                variant.state = state;
                variant.shared = shared;
                variant.by_four = by_four;
                if shared && !can_share(pass, variant)
                    || by_four && !shaders::can_read_by_four(pass, problem)
                {
                    continue;
                }
                // The scan's first run where there are segments.
                let runs: &[_] = match pass {
                    Pass::Scan | Pass::MatrixScan | Pass::MatrixScanWide => {
                        &[None, Some(("TRANSITION", 1.0))]
                    }
                    _ => &[None],
                };
                for &transition in runs {
                    let mut constants = shaders::constants(pass, variant, problem, shape);
                    constants.extend(transition);
                    let bits: Vec<_> = constants.iter().map(|&(n, x)| (n, x.to_bits())).collect();
                    if seen.insert((pass, variant, bits)) {
                        out.push(Entry {
                            problem: problem.clone(),
                            pass,
                            variant,
                            constants,
                            loops: matrix.map(|m| m.unrolled()).unwrap_or_default(),
                        });
                    }
                }
            }
        }
    };
    for rule in rules() {
        for (i, (key_dim, value_dim)) in [(128, 128), (60, 33), (256, 256), (1, 1)]
            .into_iter()
            .enumerate()
        {
            let sizes = [1, 64, 1, 2, key_dim, value_dim];
            for (j, problem) in forms(rule, sizes).iter().enumerate() {
                if i > 0 && j > 0 {
                    break;
                }
                for chunk in CHUNK_SIZES {
                    for (units, limits) in matrix_devices().into_iter().filter(|_| matrix_tier) {
                        // With 64 columns a workgroup, with 32 and with 16, where there are as many.
                        for width in [1, 8, 128] {
                            let shape =
                                ChunkShape::on_matrix_units(problem, chunk, units, &limits, width);
                            let Ok(shape) = shape else { continue };
                            // (Of the scan's two forms the one that the shape is for.)
                            let scans = [Pass::MatrixScan, Pass::MatrixScanWide];
                            let other = |p: &Pass| {
                                scans.contains(p) && shape.matrix.is_some_and(|m| m.scan() != *p)
                            };
                            let asked = |p: &Pass| p.is_matrix() && !other(p);
                            for pass in Pass::ALL.into_iter().filter(asked) {
                                add(pass, problem, Some(&shape));
                            }
                        }
                    }
                    if matrix_tier {
                        continue;
                    }
                    let chunked = |pass: &Pass| {
                        !matches!(pass, Pass::Decode | Pass::Pack) && !pass.is_matrix()
                    };
                    if let Some(shape) = ChunkShape::new(problem, chunk) {
                        for pass in Pass::ALL.into_iter().filter(chunked) {
                            add(pass, problem, Some(&shape));
                        }
                    }
                }
                if !matrix_tier {
                    add(Pass::Decode, problem, None);
                    add(Pass::Pack, problem, None);
                }
            }
        }
    }
    out
}

/// A part of the entries in which every text occurs, and every value of every constant of each pass.
pub fn covering() -> Vec<Entry> {
    let mut texts = HashSet::new();
    let mut values = HashSet::new();
    entries()
        .into_iter()
        .filter(|entry| {
            let mut new = texts.insert((entry.pass, entry.variant));
            for &(name, value) in &entry.constants {
                new |= values.insert((entry.pass, name, value.to_bits()));
            }
            new
        })
        .collect()
}
