//! Pipelines kept on disk: found again, and never a reason to fail, whatever is where the file should be.

#[path = "common/device.rs"]
mod device;

use eda_wgpu::gpu::cache::Found;
use eda_wgpu::gpu::kernels::{Kernels, Slice};
use eda_wgpu::{Engine, EngineOptions, Operand, PrefillOptions, Problem, Rule, Tensors, generate};
use std::path::{Path, PathBuf};

/// Opens an engine that keeps its pipelines there, and runs something.
fn run(directory: &Path) -> (Option<Found>, Vec<f32>) {
    let options = EngineOptions {
        pipeline_cache: Some(directory.to_owned()),
        skip_self_test: true,
        ..device::options()
    };
    let engine = device::wait(Engine::open(&options)).expect("opens");
    let problem = Problem::new(Rule::Kda, [1, 20, 1, 1, 8, 8]);
    let inputs = generate::tensors(&problem, &Default::default());
    let options = PrefillOptions::default();
    let run = device::wait(engine.prefill(&problem, &inputs.slices(), &options, &|_, _| {}));
    let Engine::Gpu(gpu) = &engine else {
        panic!("a GPU was asked for");
    };
    let found = gpu.pipeline_cache().map(|cache| cache.found());
    (found, run.expect("runs").outputs.o)
}

/// The only file there.
fn file(directory: &Path) -> PathBuf {
    let files: Vec<PathBuf> = std::fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

/// Whether the adapter under test can keep pipelines at all: on Vulkan, and there each can, so that no driver passes
/// these tests by keeping nothing. Elsewhere nothing is written.
fn offered() -> bool {
    let adapter = device::adapter();
    let offered = adapter.features().contains(wgpu::Features::PIPELINE_CACHE);
    let vulkan = adapter.get_info().backend == wgpu::Backend::Vulkan;
    assert_eq!(offered, vulkan, "{:?}", adapter.get_info());
    offered
}

/// Binds a prefill on a host's device: how many pipelines were built.
fn bind(kernels: &Kernels) -> usize {
    let problem = Problem::new(Rule::Linear, [1, 16, 1, 1, 4, 4]);
    let plan = kernels
        .plan_prefill(&problem, &Default::default())
        .expect("a plan");
    let buffers = ["q", "k", "v", "o", "state"].map(|name| {
        kernels
            .buffer(name, 1024, wgpu::BufferUsages::STORAGE, None)
            .expect("a buffer")
    });
    let [q, k, v, o, state] = buffers.each_ref().map(Slice::whole);
    let tensors = Tensors::new()
        .with(Operand::Q, q)
        .with(Operand::K, k)
        .with(Operand::V, v);
    kernels
        .prefill(&plan, &tensors, o, state, None)
        .expect("bound");
    kernels.pipeline_count()
}

#[test]
fn pipelines_are_found_again_and_damaged_files_are_ignored_and_replaced() {
    let root = tempfile::tempdir().expect("a directory");
    // Made when there is something to keep.
    let directory = root.path().join("a").join("b");
    let (found, right) = run(&directory);
    if !offered() {
        assert_eq!(found, None);
        assert!(!directory.exists());
        return;
    }
    assert_eq!(found, Some(Found::Nothing));
    let path = file(&directory);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| std::fs::metadata(path).expect("there").permissions().mode();
        assert_eq!(mode(&path) & 0o777, 0o600);
        assert_eq!(mode(&directory) & 0o777, 0o700);
    }
    assert_eq!(run(&directory), (Some(Found::Pipelines), right.clone()));

    let good = std::fs::read(&path).expect("a file");
    let mut flipped = good.clone();
    *flipped.last_mut().expect("not empty") ^= 1;
    let mut longer = good.clone();
    longer.extend([0; 100]);
    let mut other_version = good.clone();
    other_version[7] = b'0';
    for (what, bytes) in [
        ("empty", vec![]),
        ("cut short", good[..good.len() / 2].to_vec()),
        ("the header alone", good[..40].to_vec()),
        ("a flipped bit", flipped),
        ("more behind it", longer),
        ("another layout", other_version),
        ("another program's", vec![0xa5; 5000]),
        ("text", b"not a cache\n".to_vec()),
    ] {
        std::fs::write(&path, bytes).expect("written");
        assert_eq!(
            run(&directory),
            (Some(Found::Refused), right.clone()),
            "{what}"
        );
        assert_eq!(
            run(&directory).0,
            Some(Found::Pipelines),
            "replaced: {what}"
        );
    }
}

#[test]
fn what_cannot_be_written_is_no_error() {
    let root = tempfile::tempdir().expect("a directory");
    let directory = root.path().join("kept");
    let (_, right) = run(&directory);
    // A file where a directory should be, and below one.
    let blocked = root.path().join("file");
    std::fs::write(&blocked, "in the way").expect("written");
    for directory in [blocked.clone(), blocked.join("below")] {
        assert_eq!(run(&directory).1, right);
    }
    assert_eq!(std::fs::read(&blocked).expect("still there"), b"in the way");
    if offered() {
        // A directory where the file should be.
        let path = file(&directory);
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("made");
        assert_eq!(run(&directory), (Some(Found::Refused), right));
        // It is left, and nothing beside it.
        assert_eq!(file(&directory), path);
        assert!(path.is_dir());
    } else {
        assert!(!directory.exists());
    }
}

#[test]
fn several_at_once_leave_one_whole_file() {
    let root = tempfile::tempdir().expect("a directory");
    let directory = root.path().join("kept");
    let outputs: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..3).map(|_| scope.spawn(|| run(&directory).1)).collect();
        runs.into_iter().map(|r| r.join().expect("runs")).collect()
    });
    assert!(outputs.iter().all(|o| *o == outputs[0]));
    if offered() {
        file(&directory);
        assert_eq!(run(&directory).0, Some(Found::Pipelines));
    } else {
        assert!(!directory.exists());
    }
}

/// A program with a device of its own may bring its own cache.
#[test]
fn kernels_of_a_host_add_to_its_cache() {
    let adapter = device::adapter();
    let (device, _queue) = device::wait(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: adapter.features() & wgpu::Features::PIPELINE_CACHE,
        ..Default::default()
    }))
    .expect("a device");
    let built = bind(&Kernels::new(&device).with_pipeline_cache(None));
    assert_eq!(built, 4);
    if !offered() {
        // There is no cache to bring.
        return;
    }
    let descriptor = wgpu::PipelineCacheDescriptor {
        label: None,
        data: None,
        fallback: true,
    };
    // SAFETY: there is no data.
    let cache = unsafe { device.create_pipeline_cache(&descriptor) };
    let kernels = Kernels::new(&device).with_pipeline_cache(Some(cache.clone()));
    assert_eq!(bind(&kernels), built);
    assert!(cache.get_data().is_some_and(|data| !data.is_empty()));
}
