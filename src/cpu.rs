//! CPU engine (stub to be replaced).
use crate::engine::{Description, PrefillOptions, Progress, Run};
use crate::error::Result;
use crate::problem::{Problem, Tensors};
use crate::slots::Row;

/// CPU engine.
pub struct CpuEngine;
/// Pool.
pub struct CpuPool;

#[allow(missing_docs, unused_variables, clippy::todo)]
impl CpuEngine {
    pub fn new() -> Self {
        Self
    }
    pub fn description(&self) -> Description {
        todo!()
    }
    pub fn prefill(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        options: &PrefillOptions,
        progress: Progress<'_>,
    ) -> Result<Run> {
        todo!()
    }
    pub fn pool(&self, problem: &Problem, slots: usize) -> Result<CpuPool> {
        todo!()
    }
    pub fn decode(
        &self,
        problem: &Problem,
        tensors: &Tensors<&[f32]>,
        pool: &mut CpuPool,
        rows: &[Row],
        options: &crate::engine::DecodeOptions,
    ) -> Result<(Vec<f32>, f64)> {
        todo!()
    }
}
#[allow(missing_docs, unused_variables, clippy::todo)]
impl CpuPool {
    pub fn slots(&self) -> usize {
        todo!()
    }
    pub fn read(&self, slot: usize) -> Result<Vec<f32>> {
        todo!()
    }
    pub fn write(&mut self, slot: usize, state: &[f32]) -> Result<()> {
        todo!()
    }
    pub fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        todo!()
    }
}
