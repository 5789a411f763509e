//! The GPU path: shaders, the plan of a call, and the recording of it into a command encoder.

pub mod engine;
pub mod kernels;
pub mod plan;
pub mod shaders;
