//! The golden cases in a browser, through its WebGPU (`cargo test --target wasm32-unknown-unknown --test web
//! --no-default-features --features file`; `scripts/web.sh test` runs it in Chromium and Firefox).

/// Every file of `tests/data/golden`, one test each.
macro_rules! golden {
    ($($name:ident)*) => {
        #[cfg(not(target_arch = "wasm32"))]
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(
            #[cfg(target_arch = "wasm32")]
            #[wasm_bindgen_test::wasm_bindgen_test]
            async fn $name() {
                let bytes = include_bytes!(concat!("data/golden/", stringify!($name), ".safetensors"));
                browser::check(stringify!($name), bytes).await;
            }
        )*
    };
}

golden! {
    comba_basic
    delta_basic
    deltaproduct_basic
    eda_basic
    eda_cliff_decay
    eda_decay_floor
    eda_extreme_decay
    eda_grouped_values
    eda_head_128
    eda_no_decay
    eda_odd_sizes
    eda_one_token
    eda_ragged_state
    eda_raw_layer_inputs
    eda_same_address
    eda_varlen
    eda_worked_example
    gdn2_basic
    gdn_basic
    kda_basic
    linear_basic
    rwkv7_basic
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn the_list_has_every_golden_file() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden");
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .expect("the folder of cases")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .map(|path| path.file_stem().expect("a name").to_string_lossy().into())
        .collect();
    found.sort();
    let mut listed = NAMES.to_vec();
    listed.sort_unstable();
    assert_eq!(listed, found);
}

#[cfg(target_arch = "wasm32")]
mod browser {
    use eda_wgpu::battery::{self, LIMIT};
    use eda_wgpu::file::{self, ReadOptions};
    use eda_wgpu::{
        Backend, Element, Engine, EngineOptions, Outputs, PrefillOptions, relative_error,
    };
    use std::cell::OnceCell;
    use std::io::Cursor;
    use std::path::Path;
    use wasm_bindgen_test::{console_log, wasm_bindgen_test_configure};

    wasm_bindgen_test_configure!(run_in_browser);

    thread_local! {
        static ENGINE: OnceCell<&'static Engine> = const { OnceCell::new() };
    }

    /// One engine for all cases: cases of the same rule and sizes share their pipelines.
    async fn engine() -> &'static Engine {
        if let Some(engine) = ENGINE.with(|cell| cell.get().copied()) {
            return engine;
        }
        let options = EngineOptions {
            backend: Backend::WebGpu,
            ..EngineOptions::default()
        };
        let engine = Engine::open(&options).await.expect("a WebGPU adapter");
        let engine: &'static Engine = Box::leak(Box::new(engine));
        let description = engine.description();
        assert_eq!(description.backend, "webgpu");
        console_log!("{description:?}");
        ENGINE.with(|cell| *cell.get_or_init(|| engine))
    }

    /// A prefill of the whole, and a prefill of all but the last tokens, which are decoded.
    pub(super) async fn check(name: &str, bytes: &'static [u8]) {
        let read = file::read_from(
            Cursor::new(bytes),
            bytes.len() as u64,
            Path::new(name),
            &ReadOptions::default(),
        );
        let input = read.expect("a golden file");
        let tensors = input.tensors.slices();
        let engine = engine().await;
        let run = engine
            .prefill(
                &input.problem,
                &tensors,
                &PrefillOptions::default(),
                &|_, _| {},
            )
            .await
            .expect("a prefill");
        let at = input.problem.tokens.saturating_sub(3);
        let decoded = battery::decode(engine, &input.problem, &tensors, at, 1, Element::F32)
            .await
            .expect("a decode");
        let right = |case: &str, outputs: &Outputs| {
            let expected = input.expected.o.as_deref().expect("expected_o");
            let o = relative_error(&outputs.o, expected);
            let expected = input.expected.final_state.as_deref();
            let state = relative_error(
                &outputs.final_state,
                expected.expect("expected_final_state"),
            );
            console_log!("{name}, {case}: o {o:.1e}, final_state {state:.1e}");
            assert!(
                o <= LIMIT && state <= LIMIT,
                "{name}, {case}: {o:e}, {state:e}"
            );
        };
        right("prefill", &run.outputs);
        right("decode", &decoded);
    }
}
