//! The GPU path: shaders, the plan of a call, and the recording of it into a command encoder.
//!
//! - [`engine`]: an opened adapter, with host slices in and host vectors out
//! - `cache` (feature `pipeline-cache`): pipelines kept on disk between runs
//! - [`kernels`]: the kernels on a device that somebody else may own
//! - [`matrix`]: what the matrix tier needs of a device, and how its passes cut the work
//! - [`plan`]: how a prefill is cut into steps that fit the device
//! - [`segments`]: which sequences of a step are cut into segments that are scanned at the same time
//! - [`shaders`]: the sources in `shaders/`, and how a pass is put together from them
//!
//! A prefill is four passes (pairs, solve, fold, scan), or three on matrix units (pairs, solve, scan); where sequences are
//! cut into segments, a first run of the scan and a join come before the last. A decode step is one.

#[cfg(feature = "pipeline-cache")]
pub mod cache;
pub mod engine;
pub mod kernels;
pub mod matrix;
pub mod plan;
#[cfg(target_arch = "wasm32")]
mod scopes;
pub mod segments;
pub mod shaders;
