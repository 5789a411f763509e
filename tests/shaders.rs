//! Every shader that can be asked for is valid WGSL within what WebGPU grants by default, and translates to
//! SPIR-V (Vulkan), MSL (Metal) and HLSL (Direct3D 12).

#[path = "common/shaders.rs"]
mod shaders;

use eda_wgpu::gpu::shaders::{Access, Pass, bindings};
use eda_wgpu::{Decay, Rule};
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::{AddressSpace, StorageAccess};
use rayon::prelude::*;
use shaders::{Entry, covering, entries, matrix_devices, matrix_entries};
use std::collections::{BTreeMap, BTreeSet};

/// The capabilities that a WebGPU device has, float16 where the shader stores it.
fn capabilities(entry: &Entry) -> Capabilities {
    if entry.has_half() {
        Capabilities::SHADER_FLOAT16
    } else {
        Capabilities::empty()
    }
}

fn parsed(entry: &Entry) -> naga::Module {
    let source = entry.source();
    naga::front::wgsl::parse_str(&source).unwrap_or_else(|e| {
        panic!("{}:\n{}", entry.text_name(), e.emit_to_string(&source));
    })
}

fn label(entry: &Entry) -> String {
    format!("{} for {:?}", entry.text_name(), entry.problem)
}

/// Runs a check on every entry, parsing each text once.
fn each(check: impl Fn(&Entry, &naga::Module, &naga::valid::ModuleInfo) + Sync) {
    let mut texts: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
    for entry in entries() {
        texts.entry(entry.text_name()).or_default().push(entry);
    }
    assert!(texts.len() > 40, "{} texts", texts.len());
    texts.par_iter().for_each(|(name, entries)| {
        let module = parsed(&entries[0]);
        let caps = capabilities(&entries[0]);
        let info = Validator::new(ValidationFlags::all(), caps)
            .validate(&module)
            .unwrap_or_else(|e| panic!("{name}: {e:?}"));
        for entry in entries {
            let constants: naga::back::PipelineConstants = entry
                .constants
                .iter()
                .map(|&(name, value)| (name.to_owned(), value))
                .collect();
            let stage = Some((naga::ShaderStage::Compute, "main"));
            let (module, info) = naga::back::pipeline_constants::process_overrides(
                &module, &info, stage, &constants,
            )
            .unwrap_or_else(|e| panic!("{}: {e:?}", label(entry)));
            check(entry, &module, &info);
        }
    });
}

/// "16 KiB workgroup memory or 256 invocations exceeded", "8-storage-buffer limit exceeded".
#[test]
fn every_shader_fits_the_webgpu_default_limits() {
    let limits = wgpu::Limits::default();
    let nine = std::sync::Mutex::new(BTreeSet::new());
    each(|entry, module, _| {
        let label = label(entry);
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).expect("a layout");
        let workgroup: u32 = module
            .global_variables
            .iter()
            .filter(|(_, v)| v.space == AddressSpace::WorkGroup)
            .map(|(_, v)| layouter[v.ty].size.next_multiple_of(16))
            .sum();
        assert!(
            workgroup <= limits.max_compute_workgroup_storage_size,
            "{label}: {workgroup} bytes of workgroup memory"
        );
        let size = module.entry_points[0].workgroup_size;
        let invocations: u32 = size.iter().product();
        assert!(
            invocations <= limits.max_compute_invocations_per_workgroup,
            "{label}: {invocations} invocations"
        );
        let storage = entry.storage_buffers();
        if storage > limits.max_storage_buffers_per_shader_stage as usize {
            assert_eq!(storage, 9, "{label}");
            let gate = matches!(entry.problem.decay, Decay::Gate(_));
            nine.lock()
                .expect("no panic")
                .insert((entry.pass, entry.problem.rule.name(), gate));
        }
    });
    // Rules with two vectors of their own, decoding from the layer's decay inputs, are the only ones that
    // need a ninth binding.
    let expected = [Rule::Gdn2, Rule::Rwkv7].map(|rule| (Pass::Decode, rule.name(), true));
    assert_eq!(nine.into_inner().expect("no panic"), expected.into());
}

/// What the host binds is what the shader declares, with the same access.
#[test]
fn every_shader_declares_the_bindings_that_the_host_makes() {
    for entry in covering() {
        let module = parsed(&entry);
        let declared: BTreeMap<u32, &str> = module
            .global_variables
            .iter()
            .filter_map(|(_, v)| {
                let binding = v.binding?;
                assert_eq!(binding.group, 0);
                let access = match v.space {
                    AddressSpace::Uniform => "uniform",
                    AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => {
                        "read_write"
                    }
                    AddressSpace::Storage { .. } => "read",
                    other => panic!("{other:?}"),
                };
                Some((binding.binding, access))
            })
            .collect();
        let made: BTreeMap<u32, &str> = bindings(entry.pass, entry.variant)
            .into_iter()
            .map(|(binding, access)| {
                let table = binding == eda_wgpu::gpu::shaders::Binding::Table;
                let access = match access {
                    Access::Uniform => "uniform",
                    Access::Write => "read_write",
                    Access::Read if entry.variant.shared && !table => "read_write",
                    Access::Read => "read",
                };
                (binding as u32, access)
            })
            .collect();
        assert_eq!(declared, made, "{}", label(&entry));
    }
}

/// Lengths come as parameters, and nothing beyond the core language is used but float16.
#[test]
fn no_shader_asks_for_array_lengths_or_extensions() {
    for entry in covering() {
        let source = entry.source();
        let code: Vec<&str> = source
            .lines()
            .map(|line| line.split("//").next().unwrap_or_default())
            .collect();
        for word in ["arrayLength", "subgroup", "requires ", "atomic"] {
            let found = code.iter().find(|line| line.contains(word));
            assert_eq!(found, None, "{}", entry.text_name());
        }
        let enabled: Vec<_> = code.iter().filter(|line| line.contains("enable")).collect();
        if entry.has_half() {
            assert_eq!(enabled, [&"enable f16;"]);
        } else {
            assert!(enabled.is_empty(), "{enabled:?}");
        }
    }
}

/// NVIDIA's compiler (driver 580) skips such a reduction in a loop where a predicate of its caller happens to be set: no software
/// driver shows it. Shuffles do the same.
#[test]
fn no_matrix_shader_reduces_over_a_subgroup() {
    for entry in matrix_entries() {
        let source = entry.source();
        let code = source.lines().map(|l| l.split("//").next().unwrap_or(l));
        for line in code {
            for (_, rest) in line
                .match_indices("subgroup")
                .map(|(i, s)| line.split_at(i + s.len()))
            {
                let calls = rest.starts_with(char::is_uppercase) && !rest.starts_with("Shuffle");
                assert!(!calls, "{}: {line}", entry.text_name());
            }
        }
    }
}

#[test]
fn every_shader_translates_to_spirv() {
    each(|entry, module, info| {
        let options = naga::back::spv::Options::default();
        let words = naga::back::spv::write_vec(module, info, &options, None)
            .unwrap_or_else(|e| panic!("{}: {e:?}", label(entry)));
        assert_eq!(words[0], 0x0723_0203, "the magic number");
    });
}

#[test]
fn every_shader_translates_to_msl() {
    each(|entry, module, info| {
        let options = naga::back::msl::Options {
            lang_version: (2, 4),
            ..Default::default()
        };
        let (text, translation) =
            naga::back::msl::write_string(module, info, &options, &Default::default())
                .unwrap_or_else(|e| panic!("{}: {e:?}", label(entry)));
        assert!(text.contains("kernel void"), "{}", label(entry));
        for name in translation.entry_point_names {
            name.unwrap_or_else(|e| panic!("{}: {e:?}", label(entry)));
        }
    });
}

#[test]
fn every_shader_translates_to_hlsl() {
    each(|entry, module, info| {
        let options = naga::back::hlsl::Options {
            // float16 needs shader model 6.2 (DXC); float32 goes through the older compiler too.
            shader_model: if entry.has_half() {
                naga::back::hlsl::ShaderModel::V6_2
            } else {
                naga::back::hlsl::ShaderModel::V5_1
            },
            fake_missing_bindings: true,
            ..Default::default()
        };
        let pipeline = naga::back::hlsl::PipelineOptions::default();
        let mut text = String::new();
        let translation = naga::back::hlsl::Writer::new(&mut text, &options, &pipeline)
            .write(module, info, None)
            .unwrap_or_else(|e| panic!("{}: {e:?}", label(entry)));
        assert!(text.contains("numthreads"), "{}", label(entry));
        for name in translation.entry_point_names {
            name.unwrap_or_else(|e| panic!("{}: {e:?}", label(entry)));
        }
    });
}

/// The matrix tier's shaders are valid and translate to SPIR-V, as they stand and with their loops written out; they
/// declare no binding that the host does not make, and use no more workgroup memory than the host has counted.
#[test]
fn matrix_shaders_are_valid_and_fit_their_device() {
    let entries = matrix_entries();
    assert!(entries.len() > 200, "{} entries", entries.len());
    let checked: usize = entries
        .par_iter()
        .enumerate()
        .map(|(i, entry)| {
            let label = label(entry);
            // Written out they are long: every seventh of those.
            let texts = [Some(entry.source()), (i % 7 == 0).then(|| entry.unrolled())];
            let texts: Vec<String> = texts.into_iter().flatten().collect();
            for text in &texts {
                let module = naga::front::wgsl::parse_str(text)
                    .unwrap_or_else(|e| panic!("{label}:\n{}", e.emit_to_string(text)));
                let info = Validator::new(ValidationFlags::all(), Capabilities::all())
                    .validate(&module)
                    .unwrap_or_else(|e| panic!("{label}: {}", e.emit_to_string(text)));
                let constants: naga::back::PipelineConstants = entry
                    .constants
                    .iter()
                    .map(|&(name, value)| (name.to_owned(), value))
                    .collect();
                let stage = Some((naga::ShaderStage::Compute, "main"));
                let (module, info) = naga::back::pipeline_constants::process_overrides(
                    &module, &info, stage, &constants,
                )
                .unwrap_or_else(|e| panic!("{label}: {e:?}"));
                let mut layouter = naga::proc::Layouter::default();
                layouter.update(module.to_ctx()).expect("a layout");
                let used: u32 = module
                    .global_variables
                    .iter()
                    .filter(|(_, v)| v.space == AddressSpace::WorkGroup)
                    .map(|(_, v)| layouter[v.ty].size.next_multiple_of(16))
                    .sum();
                let edge = entry.variant.edge;
                let (_, limits) = matrix_devices()
                    .into_iter()
                    .find(|(units, _)| units.edge == edge)
                    .expect("a device with this edge");
                assert!(
                    used <= limits.max_compute_workgroup_storage_size,
                    "{label}: {used} bytes of workgroup memory"
                );
                let declared: BTreeSet<u32> = module
                    .global_variables
                    .iter()
                    .filter_map(|(_, v)| Some(v.binding?.binding))
                    .collect();
                let made: BTreeSet<u32> = bindings(entry.pass, entry.variant)
                    .into_iter()
                    .map(|(binding, _)| binding as u32)
                    .collect();
                // (What a rule leaves unused is gone by now.)
                assert!(declared.is_subset(&made), "{label}: {declared:?}");
                let options = naga::back::spv::Options {
                    lang_version: (1, 4),
                    ..Default::default()
                };
                naga::back::spv::write_vec(&module, &info, &options, None)
                    .unwrap_or_else(|e| panic!("{label}: {e:?}"));
            }
            texts.len()
        })
        .sum();
    assert!(checked > entries.len());
}

/// What GPUs get, with marked loops written out, is as valid as what software drivers and browsers get.
#[test]
fn written_out_loops_are_valid() {
    let mut seen = BTreeSet::new();
    for entry in covering() {
        let text = entry.unrolled();
        if text == entry.source() + "\n" || !seen.insert(entry.text_name()) {
            continue;
        }
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|e| panic!("{}:\n{}", entry.text_name(), e.emit_to_string(&text)));
        Validator::new(ValidationFlags::all(), capabilities(&entry))
            .validate(&module)
            .unwrap_or_else(|e| panic!("{}: {}", entry.text_name(), e.emit_to_string(&text)));
        assert!(!text.contains("// unrolled"), "{}", entry.text_name());
    }
    assert!(
        seen.iter().any(|name| name.starts_with("prefill_pairs")),
        "{seen:?}"
    );
}

/// What is handed to a browser's own compiler stays small, and still has every text and every constant's value.
#[test]
fn the_covering_part_is_small_and_complete() {
    let part = covering();
    assert!(part.len() <= 220, "{} entries", part.len());
    let texts =
        |list: &[Entry]| -> BTreeSet<String> { list.iter().map(Entry::text_name).collect() };
    let values = |list: &[Entry]| -> BTreeSet<(Pass, &'static str, u64)> {
        list.iter()
            .flat_map(|e| {
                e.constants
                    .iter()
                    .map(|&(name, x)| (e.pass, name, x.to_bits()))
            })
            .collect()
    };
    let all = entries();
    assert_eq!(texts(&part), texts(&all));
    assert_eq!(values(&part), values(&all));
}
