//! Segments: where a scan has too few workgroups for the device, long pieces of sequences are cut, and the segments
//! are scanned at the same time.
//!
//! A segment acts on the state as `S → M S + N`. A first run of the scan finds `M` and `N` of all segments but the last
//! of a piece, a small pass joins them (`shaders/prefill_join.wgsl`), and a second run, from the states that this
//! leaves, computes the outputs. That is about three times the work of a plain scan, so it pays only where the device
//! would idle: `Cut::choose` compares the two.

use super::plan::{Bounds, Source, Step, state_bytes};
use super::shaders::ChunkShape;
use crate::problem::Problem;

/// Destination of a segment whose state nobody needs: `NOWHERE` in the shaders.
const NOWHERE: u32 = u32::MAX;
/// No segment is shorter, in chunks.
const SHORTEST: usize = 8;
/// Most segments of a piece: bounds the loop of the join.
pub const MOST: usize = 64;
/// What joining one segment costs, in chunks of a scan, and what starting one wave of workgroups does.
const JOIN_COST: f64 = 1.2;
const START_COST: f64 = 8.0;

/// A piece's entry in the table for a scan that leaves state number `to`, from `source` (number `from`).
pub fn scan_entry(first_chunk: u32, chunks: u32, to: u32, source: Source, from: u32) -> [u32; 4] {
    [first_chunk, chunks, to, source as u32 | from << 2]
}

/// How the pieces of a step are cut: into segments of `length` chunks each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    length: usize,
}

/// Workgroups of a scan for a chunk of all heads of a step.
struct Load {
    /// For the outputs.
    values: usize,
    /// For `M` and `N`.
    transitions: usize,
    /// Chunks of each piece.
    pieces: Vec<usize>,
}

impl Load {
    fn longest(&self) -> usize {
        self.pieces.iter().copied().max().unwrap_or(0)
    }

    /// How long a scan takes, in chunks: waves of workgroups as long as the longest.
    fn cost(&self, cut: Option<Cut>, width: usize) -> f64 {
        let total: usize = self.pieces.iter().sum();
        let time = |longest: usize, work: usize| {
            let waves = work.div_ceil((longest * width).max(1));
            waves as f64 * (longest as f64 + START_COST)
        };
        let Some(Cut { length }) = cut else {
            return time(self.longest(), total * self.values);
        };
        let before_last = |n: usize| n.saturating_sub(1) / length * length;
        let transitions: usize = self.pieces.iter().map(|&n| before_last(n)).sum();
        time(length, transitions * self.transitions)
            + JOIN_COST * self.longest().div_ceil(length) as f64
            + time(length, total * self.values)
    }
}

impl Cut {
    fn segments(self, chunks: usize) -> usize {
        chunks.div_ceil(self.length).max(1)
    }

    /// What was asked for, as near to it as memory allows, or what the model says is faster than no cut by a tenth.
    fn choose(load: &Load, bounds: &Bounds, slot_bytes: u64) -> Option<Self> {
        let longest = load.longest();
        let most = (bounds.scratch / 4).min(bounds.window());
        let of = |segments: usize| Self {
            length: longest.div_ceil(segments).max(1),
        };
        let fits = |cut: &Self| {
            let slots: usize = load.pieces.iter().map(|&n| cut.segments(n)).sum();
            slots as u64 * slot_bytes <= most && cut.segments(longest) > 1
        };
        if let Some(asked) = bounds.segments {
            return (2..=asked.min(MOST)).rev().map(of).find(fits);
        }
        let plain = load.cost(None, bounds.width);
        (2..=MOST.min(longest / SHORTEST))
            .map(of)
            .filter(fits)
            .map(|cut| (cut, load.cost(Some(cut), bounds.width)))
            .filter(|(_, cost)| *cost < 0.9 * plain)
            .min_by(|(_, a), (_, b)| a.total_cmp(b))
            .map(|(cut, _)| cut)
    }
}

/// How long a scan takes at least by the model, cut or not, in chunks of a workgroup: with so many workgroups for the
/// values and for the transitions of a chunk of all heads, of pieces of so many chunks.
pub fn least_cost(values: usize, transitions: usize, pieces: Vec<usize>, width: usize) -> f64 {
    let load = Load {
        values,
        transitions,
        pieces,
    };
    let longest = load.longest();
    (2..=MOST.min(longest / SHORTEST))
        .map(|segments| Cut {
            length: longest.div_ceil(segments),
        })
        .map(|cut| load.cost(Some(cut), width))
        .fold(load.cost(None, width), f64::min)
}

/// Bytes that a slot takes: a state and a transition for each value head.
pub fn slot_bytes(problem: &Problem) -> u64 {
    let k = problem.key_dim;
    state_bytes(problem) + (problem.value_heads * k * k) as u64 * 4
}

/// Cuts the pieces of a step into segments where that is asked for or pays. The table then holds, after the chunks, the
/// segments as the second run of the scan takes them, all but the last of each piece as the first run does, and the
/// pieces as the join does.
pub fn cut(step: &mut Step, problem: &Problem, shape: &ChunkShape, bounds: &Bounds) {
    let blocks = |columns: usize| columns.div_ceil(shape.columns) * step.heads.len();
    let load = Load {
        values: blocks(problem.value_dim),
        transitions: blocks(problem.value_dim) + blocks(problem.key_dim),
        pieces: step.pieces().map(|piece| piece[1] as usize).collect(),
    };
    let Some(cut) = Cut::choose(&load, bounds, slot_bytes(problem)) else {
        return;
    };
    let mut scans = Vec::new();
    let mut transitions = Vec::new();
    let mut joins = Vec::new();
    for [first, chunks, state, source] in step.pieces() {
        let slot = scans.len();
        let count = cut.segments(*chunks as usize);
        for i in 0..count {
            let start = *first as usize + i * cut.length;
            let end = (start + cut.length).min((*first + *chunks) as usize);
            let (start, length, here) = (start as u32, (end - start) as u32, (slot + i) as u32);
            let last = i + 1 == count;
            let to = if last { *state } else { NOWHERE };
            scans.push(scan_entry(start, length, to, Source::Initial, here));
            if !last {
                transitions.push(scan_entry(start, length, here + 1, Source::Zero, 0));
            }
        }
        joins.push([slot as u32, count as u32, *state, source & 3]);
    }
    step.table.truncate(step.chunks);
    step.slots = scans.len();
    step.scans = step.append(scans);
    step.transitions = step.append(transitions);
    step.joins = step.append(joins);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(heads: usize, pieces: &[usize]) -> Load {
        Load {
            values: 8 * heads,
            transitions: 16 * heads,
            pieces: pieces.to_vec(),
        }
    }

    fn bounds(segments: Option<usize>, width: usize) -> Bounds {
        Bounds {
            scratch: 176 << 20,
            binding: 1 << 31,
            element: crate::Element::F32,
            iterations: usize::MAX,
            segments,
            width,
        }
    }

    const SLOT: u64 = 2 * 128 * 128 * 4;

    #[test]
    fn sequences_are_cut_only_where_the_device_would_idle() {
        let choose = |heads, pieces: &[usize], width| {
            let slot = SLOT * heads as u64;
            Cut::choose(&load(heads, pieces), &bounds(None, width), slot)
        };
        // One head of eight blocks on a device of 192: many segments.
        let cut = choose(1, &[2048], 192).expect("a cut");
        assert!((8..=64).contains(&cut.segments(2048)), "{cut:?}");
        // Two thirds of the device are busy: three times the work would not pay.
        assert_eq!(choose(16, &[2048], 192), None);
        // Many sequences keep it busy as well.
        assert_eq!(choose(1, &[256; 24], 192), None);
        // One long sequence among short ones does not.
        assert!(choose(1, &[2048, 10, 10, 10], 192).is_some());
        // A device of one workgroup, and sequences too short to cut.
        assert_eq!(choose(1, &[2048], 1), None);
        assert_eq!(choose(1, &[15], 192), None);
        assert_eq!(choose(1, &[], 192), None);
    }

    #[test]
    fn the_model_counts_both_runs_and_the_join() {
        let load = load(1, &[100]);
        let wave = |chunks: f64| chunks + START_COST;
        assert_eq!(load.cost(None, 1000), wave(100.0));
        assert_eq!(load.cost(None, 4), 2.0 * wave(100.0));
        assert_eq!(load.cost(None, 5), 2.0 * wave(100.0));
        // Ten segments: ten chunks, ten joins, ten chunks.
        let joins = 10.0 * JOIN_COST;
        let cut = Some(Cut { length: 10 });
        assert_eq!(load.cost(cut, 1000), 2.0 * wave(10.0) + joins);
        // Nine segments of sixteen workgroups each, then ten of eight.
        assert_eq!(
            load.cost(cut, 8),
            18.0 * wave(10.0) + joins + 10.0 * wave(10.0)
        );
    }

    #[test]
    fn the_least_cost_is_that_of_full_waves_or_of_the_best_cut() {
        let wave = |chunks: f64| chunks + START_COST;
        // Three workgroups on a device of two take two waves; of one chunk nothing can be cut.
        assert_eq!(least_cost(3, 6, vec![1], 2), 2.0 * wave(1.0));
        assert_eq!(least_cost(3, 6, vec![], 2), 0.0);
        assert_eq!(least_cost(128, 256, vec![512], 128), wave(512.0));
        // 4 workgroups on a device of 128: 17 segments of 61, of which the first run has 16 x 8 workgroups.
        let cut = wave(61.0) + 17.0 * JOIN_COST + wave(61.0);
        assert_eq!(least_cost(4, 8, vec![1024], 128), cut);
    }

    #[test]
    fn what_is_asked_for_is_taken_as_far_as_memory_goes() {
        let ask = |segments, pieces: &[usize], slot| {
            let cut = Cut::choose(&load(1, pieces), &bounds(Some(segments), 1), slot);
            cut.map(|cut| cut.segments(pieces[0]))
        };
        assert_eq!(ask(1, &[100], SLOT), None);
        assert_eq!(ask(5, &[100], SLOT), Some(5));
        assert_eq!(ask(3, &[2], SLOT), Some(2));
        assert_eq!(ask(3, &[1], SLOT), None);
        assert_eq!(ask(usize::MAX, &[1000], SLOT), Some(63));
        // Eleven slots of 4 MiB fit a quarter of 176 MiB.
        assert_eq!(ask(40, &[1100], 4 << 20), Some(11));
        assert_eq!(ask(40, &[1100], 1 << 30), None);
    }
}
