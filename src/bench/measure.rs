//! Timing on a device: warm-up, then samples by its clock, or by the host's over many repetitions.

use super::Effort;
use super::report::{Samples, Timing};
use crate::error::{Error, Result};
use crate::gpu::engine::GpuEngine;
use futures::FutureExt;
use std::ops::Range;
use std::time::Duration;
use web_time::Instant;

/// No submission takes longer by what the first one took: systems reset a device that is busy for two seconds.
const SUBMISSION: Duration = Duration::from_millis(400);
/// By the host's clock a sample takes at least this long, so that what submitting costs does not count much.
const WALL_SAMPLE: Duration = Duration::from_millis(20);
/// Most samples of one query set: wgpu allows 4,096 queries.
const MOST_SAMPLES: usize = 2048;
/// However little time there is.
const FEWEST_SAMPLES: usize = 5;

/// Records some of its parts.
type Record<'a> = Box<dyn Fn(&mut wgpu::ComputePass<'_>, Range<usize>) + 'a>;

/// Work that can be submitted in parts, in order.
pub(super) struct Work<'a> {
    pub(super) parts: usize,
    pub(super) record: Record<'a>,
}

/// The outcome of a future that never waits: natively every wait polls the device until it is over.
pub(super) fn now<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    future
        .now_or_never()
        .unwrap_or_else(|| Err(Error::Device("the device did not finish its work".into())))
}

/// Polls until all work is done; in a browser the event loop does that.
fn poll(engine: &GpuEngine) -> Result<()> {
    #[cfg(not(target_arch = "wasm32"))]
    if let Err(e) = engine
        .kernels()
        .device()
        .poll(wgpu::PollType::wait_indefinitely())
    {
        engine.check()?;
        return Err(Error::Device(format!("waiting for the device: {e}")));
    }
    #[cfg(target_arch = "wasm32")]
    let _ = engine;
    Ok(())
}

/// Waits until everything submitted is done.
async fn wait(engine: &GpuEngine) -> Result<()> {
    let (sender, receiver) = futures::channel::oneshot::channel();
    engine.queue().on_submitted_work_done(move || {
        // The receiver is gone only where an earlier error ended the measurement.
        let _ = sender.send(());
    });
    poll(engine)?;
    let done = receiver.await;
    engine.check()?;
    done.map_err(|_| Error::DeviceLost("work was never reported as done".into()))
}

/// One compute pass with some parts, in a submission of its own.
fn submit(
    engine: &GpuEngine,
    work: &Work<'_>,
    parts: Range<usize>,
    stamps: Option<wgpu::ComputePassTimestampWrites<'_>>,
) {
    let device = engine.kernels().device();
    let mut encoder = device.create_command_encoder(&Default::default());
    record(&mut encoder, work, parts, stamps);
    engine.queue().submit([encoder.finish()]);
}

fn record(
    encoder: &mut wgpu::CommandEncoder,
    work: &Work<'_>,
    parts: Range<usize>,
    timestamp_writes: Option<wgpu::ComputePassTimestampWrites<'_>>,
) {
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
        label: Some("eda: bench"),
        timestamp_writes,
    });
    (work.record)(&mut pass, parts);
}

/// The whole work in submissions of at most `group` parts; with a query set, its clock is read before the first
/// and after the last.
fn submit_all(
    engine: &GpuEngine,
    work: &Work<'_>,
    group: usize,
    stamps: Option<(&wgpu::QuerySet, u32)>,
) {
    let mut at = 0;
    while at < work.parts {
        let end = work.parts.min(at.saturating_add(group));
        let writes = stamps.and_then(|(query_set, i)| {
            let first = (at == 0).then_some(i);
            let last = (end == work.parts).then_some(i + 1);
            (first.is_some() || last.is_some()).then_some(wgpu::ComputePassTimestampWrites {
                query_set,
                beginning_of_pass_write_index: first,
                end_of_pass_write_index: last,
            })
        });
        submit(engine, work, at..end, writes);
        at = end;
    }
}

/// A query set of time stamps.
fn queries(engine: &GpuEngine, count: u32) -> wgpu::QuerySet {
    let descriptor = wgpu::QuerySetDescriptor {
        label: Some("eda: bench"),
        ty: wgpu::QueryType::Timestamp,
        count,
    };
    engine.kernels().device().create_query_set(&descriptor)
}

/// Reads pairs of stamps: milliseconds between the two of each. `None` where the device's clock stands still or
/// goes backwards.
async fn read(
    engine: &GpuEngine,
    queries: &wgpu::QuerySet,
    count: u32,
) -> Result<Option<Vec<f64>>> {
    let kernels = engine.kernels();
    let bytes = u64::from(count) * 8;
    let resolve = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
    let resolved = kernels.buffer("times", bytes, resolve, None)?;
    let map = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
    let readback = kernels.buffer("times", bytes, map, None)?;
    let mut encoder = kernels.device().create_command_encoder(&Default::default());
    encoder.resolve_query_set(queries, 0..count, &resolved, 0);
    encoder.copy_buffer_to_buffer(&resolved, 0, &readback, 0, bytes);
    engine.queue().submit([encoder.finish()]);
    let (sender, receiver) = futures::channel::oneshot::channel();
    readback.map_async(wgpu::MapMode::Read, 0..bytes, move |result| {
        let _ = sender.send(result);
    });
    poll(engine)?;
    let mapped = receiver.await;
    engine.check()?;
    match mapped {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return Err(Error::Device(format!("reading times: {e}"))),
        Err(_) => return Err(Error::DeviceLost("a read-back never completed".into())),
    }
    let view = readback
        .get_mapped_range(0..bytes)
        .map_err(|e| Error::Device(format!("reading times: {e}")))?;
    let ticks: Vec<u64> = bytemuck::pod_collect_to_vec(&view[..]);
    let period = f64::from(engine.queue().get_timestamp_period()) * 1e-6;
    Ok(ticks
        .chunks_exact(2)
        .map(|pair| match pair[1].checked_sub(pair[0]) {
            None | Some(0) => None,
            Some(ticks) => Some(ticks as f64 * period),
        })
        .collect())
}

fn has_clock(engine: &GpuEngine) -> bool {
    let features = engine.kernels().device().features();
    features.contains(wgpu::Features::TIMESTAMP_QUERY)
}

/// Parts that may go into one submission, by what the first of them takes (it is no smaller than the others).
async fn group(engine: &GpuEngine, work: &Work<'_>) -> Result<usize> {
    let first = 0..work.parts.min(1);
    // What a driver does when it first sees work is not to be counted.
    submit(engine, work, first.clone(), None);
    wait(engine).await?;
    // (The host may be slow once: work that could go into one submission is not cut for that.)
    let mut most = 0.0_f64;
    for _ in 0..3 {
        let begun = Instant::now();
        submit(engine, work, first.clone(), None);
        wait(engine).await?;
        most = most.max(SUBMISSION.as_secs_f64() / begun.elapsed().as_secs_f64().max(1e-9));
        if most >= work.parts as f64 || work.parts <= 1 {
            break;
        }
    }
    // (A float too large for an integer becomes the largest.)
    Ok((most as usize).clamp(1, work.parts.max(1)))
}

/// Times the work, milliseconds a sample. Within `budget`, fewer samples are taken of work that is long.
pub(super) async fn sample(
    engine: &GpuEngine,
    effort: Effort,
    budget: Option<Duration>,
    work: &Work<'_>,
) -> Result<Samples> {
    let group = group(engine, work).await?;
    let begun = Instant::now();
    // (Without gaps between the runs: a device that is idle now and then may stay at a low clock.)
    let mut runs = 1;
    let whole = loop {
        let run = Instant::now();
        for _ in 0..runs {
            submit_all(engine, work, group, None);
        }
        wait(engine).await?;
        let each = run.elapsed() / runs;
        if begun.elapsed() >= effort.warm_up {
            break each;
        }
        let enough = WALL_SAMPLE.as_secs_f64() / each.as_secs_f64().max(1e-9);
        runs = (enough as u32).clamp(1, 64);
    };
    let mut count = effort.samples.clamp(1, MOST_SAMPLES);
    if let Some(budget) = budget {
        let fit = budget.as_secs_f64() / whole.as_secs_f64().max(1e-9);
        count = count.min((fit as usize).max(FEWEST_SAMPLES));
    }
    if has_clock(engine) {
        let stamps = count as u32 * 2;
        let queries = queries(engine, stamps);
        for i in 0..count as u32 {
            submit_all(engine, work, group, Some((&queries, i * 2)));
        }
        if let Some(samples_ms) = read(engine, &queries, stamps).await? {
            return Ok(Samples {
                timing: Timing::Timestamps,
                repetitions: 1,
                samples_ms,
            });
        }
    }
    let enough = WALL_SAMPLE.as_secs_f64() / whole.as_secs_f64().max(1e-9);
    let repetitions = (enough.ceil() as usize).clamp(1, 1000);
    let mut samples_ms = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        for _ in 0..repetitions {
            submit_all(engine, work, group, None);
        }
        wait(engine).await?;
        samples_ms.push(begun.elapsed().as_secs_f64() * 1e3 / repetitions as f64);
    }
    Ok(Samples {
        timing: Timing::Wall,
        repetitions,
        samples_ms,
    })
}

/// Times `blocks` runs of the work, one after the other in one submission, by the device's clock: milliseconds
/// each. `None` where it has none.
pub(super) async fn blocks(
    engine: &GpuEngine,
    blocks: u32,
    work: &Work<'_>,
) -> Result<Option<Vec<f64>>> {
    if !has_clock(engine) {
        return Ok(None);
    }
    let queries = queries(engine, blocks * 2);
    let device = engine.kernels().device();
    let mut encoder = device.create_command_encoder(&Default::default());
    for i in 0..blocks {
        let stamps = wgpu::ComputePassTimestampWrites {
            query_set: &queries,
            beginning_of_pass_write_index: Some(i * 2),
            end_of_pass_write_index: Some(i * 2 + 1),
        };
        record(&mut encoder, work, 0..work.parts, Some(stamps));
    }
    engine.queue().submit([encoder.finish()]);
    read(engine, &queries, blocks * 2).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter;
    use crate::engine::{Backend, EngineOptions, Tier};
    use std::cell::RefCell;

    /// An engine on a device that has these features and no others.
    fn engine(features: wgpu::Features) -> GpuEngine {
        let options = EngineOptions {
            backend: if cfg!(target_os = "macos") {
                Backend::Metal
            } else if cfg!(windows) {
                Backend::Dx12
            } else {
                Backend::Vulkan
            },
            adapter: std::env::var("EDA_TEST_ADAPTER").ok(),
            ..EngineOptions::default()
        };
        let adapter = pollster::block_on(adapter::choose(&options))
            .ok()
            .flatten()
            .expect("this test needs a GPU driver");
        let descriptor = wgpu::DeviceDescriptor {
            required_features: features & adapter.features(),
            required_limits: adapter.limits(),
            ..Default::default()
        };
        let (device, queue) =
            pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
        let description = adapter::describe(&adapter.get_info(), Tier::Portable);
        GpuEngine::from_device(&device, &queue, description)
    }

    const ONCE: Effort = Effort {
        warm_up: Duration::ZERO,
        samples: 2,
    };

    #[test]
    fn without_a_clock_a_sample_is_the_mean_of_many_runs() {
        let engine = engine(wgpu::Features::empty());
        let runs = RefCell::new(0usize);
        let work = Work {
            parts: 1,
            record: Box::new(|_, _| *runs.borrow_mut() += 1),
        };
        let samples = now(sample(&engine, ONCE, None, &work)).expect("timed");
        assert_eq!(samples.timing, Timing::Wall);
        assert_eq!(samples.samples_ms.len(), 2);
        // An empty pass takes far less than the time that a sample has to take.
        assert!(samples.repetitions > 1);
        assert!(*runs.borrow() > 2 * samples.repetitions);
        assert!(samples.samples_ms.iter().all(|&ms| ms > 0.0));
        assert_eq!(now(blocks(&engine, 3, &work)).expect("no clock"), None);
    }

    /// "Windows kills a dispatch after 2 s": work that is long goes in submissions that are not.
    #[test]
    fn parts_are_submitted_in_order_and_each_once() {
        let engine = engine(wgpu::Features::TIMESTAMP_QUERY);
        let log = RefCell::new(Vec::new());
        let work = Work {
            parts: 7,
            record: Box::new(|_, parts| log.borrow_mut().push(parts)),
        };
        submit_all(&engine, &work, 3, None);
        assert_eq!(*log.borrow(), [0..3, 3..6, 6..7]);
        log.borrow_mut().clear();
        submit_all(&engine, &work, usize::MAX, None);
        assert_eq!(*log.borrow(), std::slice::from_ref(&(0..7)));
        if !has_clock(&engine) {
            return;
        }
        // The clock is read before the first and after the last, wherever these are.
        let queries = queries(&engine, 2);
        submit_all(&engine, &work, 3, Some((&queries, 0)));
        now(read(&engine, &queries, 2)).expect("both stamps are written");
    }
}
