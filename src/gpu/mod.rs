//! The GPU path: shaders, the plan of a call, and the recording of it into a command encoder.
//!
//! - [`engine`]: an opened adapter, with host slices in and host vectors out
//! - [`kernels`]: the kernels on a device that somebody else may own
//! - [`plan`]: how a prefill is cut into steps that fit the device
//! - [`shaders`]: the sources in `shaders/`, and how a pass is put together from them
//!
//! A prefill is four passes (pairs, solve, fold, scan), a decode step is one.

pub mod engine;
pub mod kernels;
pub mod plan;
pub mod shaders;
