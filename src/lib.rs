//! Erase-then-Delta Attention (EDA, arXiv 2606.26560) and eight related linear-attention rules on any GPU,
//! through wgpu and WGSL: chunked prefill and token-by-token decode, with a CPU engine where there is no GPU
//! and a recurrence in float64 to check both against.
//!
//! Every [`Rule`] is *decay, then sub-steps* on a state `S [K, V]`; the table is in [`rule`], the chunk form
//! that prefill uses in the README.
//!
//! # Two ways in
//! - [`Engine`] opens the best engine of this machine and says which it is. It takes host slices and returns
//!   vectors: [`Engine::prefill`] for whole sequences, [`Engine::decode`] for tokens that continue the states in
//!   a [`Pool`]. Long inputs go through in parts, in bounded GPU memory.
//! - [`gpu::kernels::Kernels`] is for programs that own a `wgpu::Device`: it records the same work into their
//!   command encoder, over slices of their buffers, and does nothing else.
//!
//! Both take a [`Problem`] (rule, sizes, sequences, the form of the inputs) and [`Tensors`] (one value for each
//! [`Operand`]); [`Problem::shape`] says what each has to hold.
//!
//! # Example
//! The first 90 tokens at once and the last 10 one by one, on whatever is there, compared with float64:
//!
//! ```
//! use eda_wgpu::{
//!     DecodeOptions, Engine, EngineOptions, PrefillOptions, Problem, Row, Rule, generate, parts, reference,
//!     relative_error,
//! };
//!
//! # fn main() -> eda_wgpu::Result<()> { pollster::block_on(async {
//! let engine = Engine::open(&EngineOptions::default()).await?;
//! println!("{}", engine.description().adapter);
//!
//! // B, T, H, HV, K, V; random inputs stand for a layer's.
//! let problem = Problem::new(Rule::Eda, [1, 100, 1, 2, 32, 32]);
//! let inputs = generate::tensors(&problem, &Default::default());
//! let inputs = inputs.slices();
//! let exact = reference::recurrence::<f64>(&problem, &inputs)?;
//!
//! let (prompt, tensors) = parts::select(&problem, &inputs, &[0..90]);
//! let run = engine
//!     .prefill(&prompt, &tensors.slices(), &PrefillOptions::default(), &|_, _| {})
//!     .await?;
//!
//! let mut o = run.outputs.o;
//! let mut pool = engine.pool(&problem, 1).await?;
//! pool.write(0, &run.outputs.final_state).await?;
//! for t in 90..100 {
//!     let (token, tensors) = parts::select(&problem, &inputs, &[t..t + 1]);
//!     let rows = [Row::continues(0)];
//!     let (row, _) = engine
//!         .decode(&token, &tensors.slices(), &mut pool, &rows, &DecodeOptions::default())
//!         .await?;
//!     o.extend(row);
//! }
//! assert!(relative_error(&o, &exact.o) < 1e-5);
//! assert!(relative_error(&pool.read(0).await?, &exact.final_state) < 1e-5);
//! # Ok(()) }) }
//! ```
//!
//! # Modules
//! | | |
//! |---|---|
//! | [`problem`], [`rule`], [`layer`] | what is to be computed, and what a layer does before |
//! | [`engine`], [`adapter`], [`slots`] | opening an engine, the adapters there are, rows of a decode batch |
//! | [`gpu`], [`cpu`] | the two engines |
//! | [`mod@reference`], [`generate`], [`battery`] | the judge, inputs that show mistakes, the built-in checks |
//! | [`parts`], [`split`], [`sequential`] | problems cut along their tokens; whole sequences through decode |
//! | `file` (feature `file`) | problems in safetensors files |
//! | `web` (feature `web`, wasm32) | the JavaScript interface |
//! | [`mod@bench`] | times of whole operations, against measured ceilings; the JSON of `eda bench` |
//! | [`rows`] | the vectors that a token contributes, read from host tensors |
//!
//! # Features
//! - `cli` (default): the command line `eda`, and `file`. Without it the crate has no argument parser among its
//!   dependencies.
//! - `file`: the module `file`, which reads and writes safetensors files.
//! - `pipeline-cache` (part of `cli`): pipelines kept on disk between runs (`gpu::cache`), in a directory that
//!   the caller names.
//! - `web`: what the npm package in `web/` is made of; nothing on other targets than wasm32.
//!
//! # In a browser
//! On wasm32 the crate uses the browser's WebGPU. Nothing waits for the device in the page's thread; the CPU engine
//! computes in the thread that calls it. What an error scope catches is told later there: whoever records kernels
//! asks `gpu::kernels::Kernels::settled`, [`Engine`] does so by itself.
//!
//! # Errors
//! [`enum@Error`] has a variant for each thing a caller can do about it: mend the input, ask for less, open another
//! device. Engines check what they are given and do not panic on bad input; an opened engine stays the one it is.
#![warn(missing_docs)]

pub mod adapter;
pub mod battery;
pub mod bench;
pub mod cpu;
pub mod engine;
pub mod error;
#[cfg(feature = "file")]
pub mod file;
pub mod generate;
pub mod gpu;
pub mod layer;
pub mod parts;
pub mod problem;
pub mod reference;
pub mod rows;
pub mod rule;
pub mod sequential;
pub mod slots;
pub mod split;
#[cfg(all(target_arch = "wasm32", feature = "web"))]
pub mod web;

pub use engine::{
    Backend, DecodeOptions, Element, Engine, EngineOptions, Pool, PrefillOptions, Tier,
};
pub use error::{Error, Result};
pub use problem::{Decay, DecayGate, GateForm, Operand, Outputs, Problem, Tensors, relative_error};
pub use rule::Rule;
pub use slots::Row;

/// The examples in the README are compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
