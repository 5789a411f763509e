use ash::vk;
use std::collections::BTreeSet;
use std::ffi::CStr;
// regs DIR: statistics of every DIR/*.wgsl with DIR/*.const (lines "NAME value"), with ROBUST=1 on a robust device.
fn compile(dir: &str, name: &str) -> Result<(Vec<u32>, Vec<(u32, bool)>), String> {
    let text = std::fs::read_to_string(format!("{dir}/{name}.wgsl")).map_err(|e| e.to_string())?;
    let consts = std::fs::read_to_string(format!("{dir}/{name}.const")).unwrap_or_default();
    let mut fe = naga::front::wgsl::Frontend::new();
    let module = fe.parse(&text).map_err(|e| e.emit_to_string(&text))?;
    let info = naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all()).validate(&module).map_err(|e| format!("{e:?}"))?;
    let mut c = naga::back::PipelineConstants::default();
    for l in consts.lines() { let mut w = l.split(' '); let n = w.next().unwrap().to_string(); c.insert(n, w.next().unwrap().parse().unwrap()); }
    let (m, i) = naga::back::pipeline_constants::process_overrides(&module, &info, Some((naga::ShaderStage::Compute, "main")), &c).map_err(|e| format!("{e:?}"))?;
    let mut o = naga::back::spv::Options::default();
    o.lang_version = (1, 6);
    o.flags = naga::back::spv::WriterFlags::empty();
    o.zero_initialize_workgroup_memory = naga::back::spv::ZeroInitializeWorkgroupMemoryMode::None;
    o.force_loop_bounding = false;
    o.emit_int_div_checks = false;
    o.bounds_check_policies = naga::proc::BoundsCheckPolicies { index: naga::proc::BoundsCheckPolicy::Unchecked, buffer: naga::proc::BoundsCheckPolicy::Unchecked, image_load: naga::proc::BoundsCheckPolicy::Unchecked, binding_array: naga::proc::BoundsCheckPolicy::Unchecked };
    o.capabilities = None;
    let spv = naga::back::spv::write_vec(&m, &i, &o, Some(&naga::back::spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: "main".into() })).map_err(|e| format!("{e:?}"))?;
    let mut b = BTreeSet::new();
    for (_, v) in m.global_variables.iter() { if let Some(r) = v.binding { b.insert((r.binding, v.space == naga::AddressSpace::Uniform)); } }
    Ok((spv, b.into_iter().collect()))
}
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let robust = std::env::var_os("ROBUST").is_some();
    unsafe {
        let entry = ash::Entry::load().unwrap();
        let app = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
        let instance = entry.create_instance(&vk::InstanceCreateInfo::default().application_info(&app), None).unwrap();
        let pd = instance.enumerate_physical_devices().unwrap()[0];
        let p = instance.get_physical_device_properties(pd);
        let have: Vec<_> = instance.enumerate_device_extension_properties(pd).unwrap();
        let has = |n: &CStr| have.iter().any(|e| e.extension_name_as_c_str() == Ok(n));
        println!("{:?} robust {robust} stats {}", p.device_name_as_c_str().unwrap(), has(ash::khr::pipeline_executable_properties::NAME));
        let mut ex = vec![];
        for n in [ash::khr::cooperative_matrix::NAME, ash::khr::pipeline_executable_properties::NAME, ash::ext::robustness2::NAME] { if has(n) { ex.push(n.as_ptr()); } }
        let mut coop = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut pe = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default().pipeline_executable_info(true);
        let mut r2 = vk::PhysicalDeviceRobustness2FeaturesEXT::default().robust_buffer_access2(robust);
        let mut v11 = vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(true).uniform_and_storage_buffer16_bit_access(true);
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default().shader_float16(true).vulkan_memory_model(true).shader_subgroup_extended_types(true);
        let mut v13 = vk::PhysicalDeviceVulkan13Features::default().subgroup_size_control(true).maintenance4(true);
        let f = vk::PhysicalDeviceFeatures::default().robust_buffer_access(robust);
        let q = [vk::DeviceQueueCreateInfo::default().queue_family_index(0).queue_priorities(&[1.0])];
        let mut ci = vk::DeviceCreateInfo::default().queue_create_infos(&q).enabled_extension_names(&ex).enabled_features(&f).push_next(&mut v11).push_next(&mut v12).push_next(&mut v13);
        if has(ash::khr::cooperative_matrix::NAME) { ci = ci.push_next(&mut coop); }
        if has(ash::khr::pipeline_executable_properties::NAME) { ci = ci.push_next(&mut pe); }
        if has(ash::ext::robustness2::NAME) { ci = ci.push_next(&mut r2); }
        let device = instance.create_device(pd, &ci, None).unwrap();
        let stats = ash::khr::pipeline_executable_properties::Device::new(&instance, &device);
        let mut names: Vec<String> = std::fs::read_dir(&dir).unwrap().filter_map(|e| e.unwrap().file_name().into_string().unwrap().strip_suffix(".wgsl").map(str::to_string)).collect();
        names.sort();
        for name in names {
            let (spv, bindings) = match compile(&dir, &name) { Ok(x) => x, Err(e) => { println!("{name}: {e}"); continue } };
            let module = device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&spv), None).unwrap();
            let lb: Vec<_> = bindings.iter().map(|&(b, u)| vk::DescriptorSetLayoutBinding::default().binding(b).descriptor_count(1).descriptor_type(if u { vk::DescriptorType::UNIFORM_BUFFER } else { vk::DescriptorType::STORAGE_BUFFER }).stage_flags(vk::ShaderStageFlags::COMPUTE)).collect();
            let sl = device.create_descriptor_set_layout(&vk::DescriptorSetLayoutCreateInfo::default().bindings(&lb), None).unwrap();
            let sls = [sl];
            let pl = device.create_pipeline_layout(&vk::PipelineLayoutCreateInfo::default().set_layouts(&sls), None).unwrap();
            let stage = vk::PipelineShaderStageCreateInfo::default().stage(vk::ShaderStageFlags::COMPUTE).module(module).name(c"main").flags(vk::PipelineShaderStageCreateFlags::ALLOW_VARYING_SUBGROUP_SIZE);
            let flags = if has(ash::khr::pipeline_executable_properties::NAME) { vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR } else { vk::PipelineCreateFlags::empty() };
            let t = std::time::Instant::now();
            let pipe = device.create_compute_pipelines(vk::PipelineCache::null(), &[vk::ComputePipelineCreateInfo::default().stage(stage).layout(pl).flags(flags)], None);
            let pipe = match pipe { Ok(p) => p[0], Err((_, e)) => { println!("{name}: {e}"); continue } };
            print!("{name}: build {:.0} ms", t.elapsed().as_secs_f64() * 1e3);
            if has(ash::khr::pipeline_executable_properties::NAME) {
                let info = vk::PipelineInfoKHR::default().pipeline(pipe);
                let n = stats.get_pipeline_executable_properties(&info).unwrap().len();
                for i in 0..n {
                    let xi = vk::PipelineExecutableInfoKHR::default().pipeline(pipe).executable_index(i as u32);
                    for s in stats.get_pipeline_executable_statistics(&xi).unwrap() {
                        let nm = CStr::from_ptr(s.name.as_ptr()).to_string_lossy().into_owned();
                        let v = match s.format { vk::PipelineExecutableStatisticFormatKHR::UINT64 => s.value.u64.to_string(), vk::PipelineExecutableStatisticFormatKHR::INT64 => s.value.i64.to_string(), vk::PipelineExecutableStatisticFormatKHR::BOOL32 => s.value.b32.to_string(), _ => s.value.f64.to_string() };
                        print!(", {nm} {v}");
                    }
                    let mut count = 0u32;
                    let _ = (stats.fp().get_pipeline_executable_internal_representations_khr)(device.handle(), &xi, &mut count, std::ptr::null_mut());
                    let mut reps = vec![vk::PipelineExecutableInternalRepresentationKHR::default(); count as usize];
                    let _ = (stats.fp().get_pipeline_executable_internal_representations_khr)(device.handle(), &xi, &mut count, reps.as_mut_ptr());
                    let mut data: Vec<Vec<u8>> = reps.iter().map(|r| vec![0u8; r.data_size + 1]).collect();
                    for (r, d) in reps.iter_mut().zip(&mut data) { r.p_data = d.as_mut_ptr().cast(); }
                    let _ = (stats.fp().get_pipeline_executable_internal_representations_khr)(device.handle(), &xi, &mut count, reps.as_mut_ptr());
                    for (k, d) in data.iter().enumerate() { let _ = std::fs::write(format!("{dir}/{name}.ir{k}"), &d[..d.len().saturating_sub(1)]); }
                }
            }
            println!();
        }
    }
}
