//! Erase-then-Delta Attention and its family on any GPU. (Crate documentation is written below.)
#![warn(missing_docs)]

pub mod adapter;
pub mod battery;
pub mod bench;
pub mod cpu;
pub mod engine;
pub mod error;
#[cfg(feature = "cli")]
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

pub use engine::{
    Backend, DecodeOptions, Element, Engine, EngineOptions, Pool, PrefillOptions, Tier,
};
pub use error::{Error, Result};
pub use problem::{Decay, DecayGate, GateForm, Operand, Outputs, Problem, Tensors, relative_error};
pub use rule::Rule;
pub use slots::Row;
