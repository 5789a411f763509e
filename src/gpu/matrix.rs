//! The matrix tier: products on the adapter's matrix units (float16 operands, float32 sums and state), where the
//! adapter has them. What it needs of a device, and how its passes cut the work.

use super::segments;
use super::shaders::Pass;
use crate::error::{Error, Result};
use crate::problem::Problem;

/// Matrix units as a device has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixUnits {
    /// Edge of a tile: 8 or 16.
    pub edge: usize,
    /// Invocations of a subgroup, always the same.
    pub subgroup: usize,
}

/// Features that the matrix tier needs a device to have.
pub const FEATURES: wgpu::Features = wgpu::Features::SHADER_F16
    .union(wgpu::Features::SUBGROUP)
    .union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);

impl MatrixUnits {
    /// The matrix units of an adapter of Vulkan: square tiles of float16 with float32 sums, subgroups of one size, and
    /// storage buffers enough. `None` where the matrix tier cannot run.
    pub fn of(adapter: &wgpu::Adapter) -> Option<Self> {
        use wgpu::CooperativeScalarType::{F16, F32};
        let info = adapter.get_info();
        let subgroup = info.subgroup_min_size as usize;
        // (Matrix loads take vectors of elements, and strides in vectors, as SPIR-V has it. Metal's take elements.)
        if info.backend != wgpu::Backend::Vulkan
            || !adapter.features().contains(FEATURES)
            || info.subgroup_max_size as usize != subgroup
            || !(8..=64).contains(&subgroup)
            || adapter.limits().max_storage_buffers_per_shader_stage < 10
        {
            return None;
        }
        adapter
            .cooperative_matrix_properties()
            .iter()
            .filter(|p| p.ab_type == F16 && p.cr_type == F32)
            .filter(|p| p.m_size == p.n_size && p.m_size == p.k_size)
            .map(|p| p.m_size as usize)
            .filter(|edge| [8, 16].contains(edge))
            .max()
            .map(|edge| Self { edge, subgroup })
    }
}

/// How the matrix tier's passes cut the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixShape {
    /// The device's units.
    pub units: MatrixUnits,
    /// Tokens a chunk, `C`, and sub-steps, `R`.
    tokens: usize,
    substeps: usize,
    /// `K` rounded up to a multiple of 16.
    key_pad: usize,
    /// Value columns a workgroup of the scan.
    pub columns: usize,
    /// Whether a subgroup of the scan owns a tile of columns ([`Pass::MatrixScanWide`]), or subgroups share them.
    pub wide: bool,
    /// Subgroups of a wide scan that share a tile of columns.
    pub share: usize,
    /// Subgroups of the scan.
    pub groups: usize,
    /// Parts in which the scan takes a chunk's `left` through workgroup memory, `lower` and `writes`.
    pub parts: [usize; 3],
    /// What it has room for at a time, where it is not wide: one of them (0), `T` and `W` or `Q` and `A` (1), or `Q`, `A` and
    /// `writes` as well (2).
    pub together: usize,
    /// Successive tokens of a thread of the pairs pass, and slabs in which it takes the channels.
    pub run: usize,
    slabs: usize,
    /// How many of the slabs a thread has channels of.
    pub own_slabs: usize,
    /// Whether `W` lies over the totals of the next chunk, a barrier more.
    pub w_over: bool,
    /// Whether the pairs pass has room for one of `L` and `A` at a time.
    pub apart: bool,
    /// Workgroups that the device runs in about the time of one.
    width: usize,
    /// `K`, and keys a token.
    key_dim: usize,
    factors: usize,
}

/// Threads of the scan, where it is not wide.
const SCAN_THREADS: usize = 256;
/// Forms of the scan: value columns a workgroup; where it is wide, subgroups that share a tile of columns, else 0; and how long
/// a workgroup takes, relatively, as timed (`benches/NOTES.md`).
const FORMS: [(usize, usize, f64); 2] = [(16, 0, 1.0), (64, 2, 2.12)];
/// Rows and columns of a block that the pairs pass inverts by substitution.
const BLOCK: usize = 16;

impl MatrixShape {
    /// The shape for chunks of `tokens` tokens, on a device that runs `width` workgroups of a scan in about the time of
    /// one.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the passes do not fit the device.
    pub fn new(
        problem: &Problem,
        tokens: usize,
        units: MatrixUnits,
        limits: &wgpu::Limits,
        width: usize,
    ) -> Result<Self> {
        let pieces: Vec<_> = (0..problem.sequences())
            .map(|i| problem.sequence(i).len().div_ceil(tokens))
            .collect();
        let time = |&(columns, _, each): &(usize, usize, f64)| {
            let blocks = |all: usize| all.div_ceil(columns) * problem.value_heads;
            let (values, keys) = (blocks(problem.value_dim), blocks(problem.key_dim));
            each * segments::least_cost(values, values + keys, pieces.clone(), width)
        };
        let mut forms = FORMS;
        forms.sort_by(|a, b| time(a).total_cmp(&time(b)));
        let shape = |&(columns, share, _): &(usize, usize, f64)| {
            Self::with_columns(problem, tokens, units, limits, width, columns, share)
        };
        forms
            .iter()
            .find_map(|form| shape(form).ok())
            .map_or_else(|| shape(&FORMS[0]), Ok)
    }

    fn with_columns(
        problem: &Problem,
        tokens: usize,
        units: MatrixUnits,
        limits: &wgpu::Limits,
        width: usize,
        columns: usize,
        share: usize,
    ) -> Result<Self> {
        let wide = share > 0;
        let factors = problem.rule.update().factors;
        let n = problem.rule.update().substeps();
        let substeps = n * tokens;
        if substeps > 64 {
            return Err(Error::unsupported(
                "chunk · sub-steps per token on matrix units",
                format!("{tokens} · {n}"),
                64,
            ));
        }
        let whole = Self {
            units,
            tokens,
            substeps,
            key_pad: problem.key_dim.next_multiple_of(16),
            columns,
            wide,
            share: share.max(1),
            groups: if wide {
                columns / units.edge * share
            } else {
                SCAN_THREADS / units.subgroup
            },
            parts: [1, 1, 1],
            together: 0,
            run: 2,
            slabs: 1,
            own_slabs: 1,
            w_over: false,
            apart: false,
            width,
            key_dim: problem.key_dim,
            factors,
        };
        // Four tokens a thread rather than more than 256 threads: what a thread does once counts more than what others hide.
        let most = (limits.max_compute_invocations_per_workgroup as usize).min(256);
        let run = if whole.pairs_threads() <= most { 2 } else { 4 };
        let whole = Self { run, ..whole };
        let memory = limits.max_compute_workgroup_storage_size as usize;
        let divisors = |tiles: usize| (1..=tiles).filter(move |&parts| tiles.is_multiple_of(parts));
        let (across, steps) = (whole.key_tiles(), substeps / units.edge);
        // Few parts, since each is a barrier more or two; where the scan is wide, an even number of them if that may be.
        let most_lower = if wide { steps } else { 1 };
        let shape = divisors(across)
            .flat_map(|left| divisors(most_lower).map(move |lower| [left, lower]))
            .flat_map(|[left, lower]| divisors(steps).map(move |writes| [left, lower, writes]))
            .flat_map(|parts| {
                let most = match parts {
                    _ if wide => 0,
                    [1, 1, 1] => 2,
                    [1, 1, _] => 1,
                    _ => 0,
                };
                (0..=most).map(move |together| (parts, together))
            })
            .map(|(parts, together)| Self {
                parts,
                together,
                ..whole
            })
            .filter(|shape| shape.scan_memory() <= memory && shape.fits_registers())
            .min_by_key(|shape| {
                let parts = shape.parts.iter().sum::<usize>();
                (wide && !parts.is_multiple_of(2), shape.stages(), parts)
            })
            .unwrap_or(Self {
                parts: [across, most_lower, steps],
                ..whole
            });
        // Few slabs, since each is two barriers more, as `apart` is, and `w_over` one. Where threads would have four tokens, they have
        // two in each of two slabs, so that all of them fill each slab.
        let shapes = || {
            divisors(across)
                .flat_map(|slabs| {
                    let may = shape.run == 4 && slabs % 2 == 0;
                    let own = if may { [2, 1].iter() } else { [1].iter() };
                    own.map(move |&own_slabs| (slabs, own_slabs))
                })
                .flat_map(|each| {
                    [(false, false), (false, true), (true, true)].map(|over| (each, over))
                })
                .map(|((slabs, own_slabs), (apart, w_over))| Self {
                    apart,
                    w_over,
                    slabs,
                    own_slabs,
                    run: shape.run / own_slabs,
                    ..shape
                })
        };
        let shape = shapes()
            .find(|shape| shape.pairs_memory() <= memory)
            .or_else(|| shapes().min_by_key(Self::pairs_memory))
            .unwrap_or(shape);
        if !shape.fits_registers() {
            return Err(Error::unsupported(
                format!("key_dim on matrix units for chunks of {tokens}"),
                problem.key_dim,
                "what the registers of a subgroup hold",
            ));
        }
        for (what, bytes) in [
            ("pairs", shape.pairs_memory()),
            ("scan", shape.scan_memory()),
        ] {
            if bytes > memory {
                return Err(Error::unsupported(
                    format!(
                        "workgroup memory of matrix_{what} for chunks of {tokens} \
                         (smaller chunks take less, the portable tier little)"
                    ),
                    format!("{bytes} bytes"),
                    format!("{memory} bytes"),
                ));
            }
        }
        let threads = shape.pairs_threads().max(shape.scan_threads());
        let most = limits.max_compute_invocations_per_workgroup as usize;
        if threads > most {
            return Err(Error::unsupported(
                format!("invocations a workgroup for chunks of {tokens} on matrix units"),
                threads,
                most,
            ));
        }
        Ok(shape)
    }

    /// Workgroups of the pairs pass for so many chunks of a head. Each takes up to 16 in turn, since it asks for the next
    /// one's inputs while it computes, but there are enough of them to even out, and a multiple of those that run at once.
    pub fn pairs_workgroups(&self, chunk_heads: u64) -> u64 {
        let width = self.width.max(1) as u64;
        let rounds = chunk_heads.div_ceil(16 * width).max(2);
        chunk_heads.min(width * rounds)
    }

    /// float32 words of scratch memory for so many chunks of a head, as in `shaders/matrix_chunk.wgsl`.
    pub fn floats(&self, chunk_heads: u64) -> u64 {
        let triangles = (self.substeps + self.tokens) * self.substeps;
        chunk_heads * (self.key_pad + 8) as u64
            + self.pairs_workgroups(chunk_heads) * triangles as u64
    }

    /// float32 words of scratch memory that one more chunk of a head takes, at least.
    pub fn stride(&self) -> usize {
        self.key_pad + 8 + self.halves()
    }

    /// Pairs of float16 of scratch memory for one chunk of one head.
    pub fn halves(&self) -> usize {
        let rows = self.substeps + self.tokens;
        (rows * (self.key_pad + self.substeps) + self.substeps * self.key_pad) / 2
    }

    /// Tiles across the channels.
    fn key_tiles(&self) -> usize {
        self.key_pad / self.units.edge
    }

    fn pairs_threads(&self) -> usize {
        (self.key_pad / 4 / self.own_slabs * (self.tokens / self.run))
            .max(128)
            .next_multiple_of(64)
    }

    /// Tiles of the triangles and of a product with small blocks of tokens, for each subgroup of the pairs pass.
    fn pairs_rounds(&self) -> [usize; 2] {
        let edge = self.units.edge;
        let n = self.substeps / self.tokens;
        let (lower, queries) = (self.substeps / edge, self.tokens / edge);
        let triangles = (lower * (lower + 1) + n * queries * (queries + 1)) / 2;
        let [down, across] = self.small_tiles();
        let subgroups = self.pairs_threads() / self.units.subgroup;
        [triangles, down * across].map(|tiles| tiles.div_ceil(subgroups))
    }

    /// Tiles down and across a product with small blocks of tokens.
    fn small_tiles(&self) -> [usize; 2] {
        let n = self.substeps / self.tokens;
        [n + 1, n].map(|each| (each * self.tokens / 2).div_ceil(self.units.edge))
    }

    /// Subgroups of the pairs pass that share a column of tiles of `W`.
    fn w_split(&self) -> usize {
        let subgroups = self.pairs_threads() / self.units.subgroup;
        let across = self.key_tiles() / self.slabs;
        let steps = self.substeps / self.units.edge;
        (0..usize::BITS)
            .map(|i| 1 << i)
            .take_while(|&split| {
                across * split <= subgroups.max(across) && steps.is_multiple_of(split)
            })
            .last()
            .unwrap_or(1)
    }

    /// Tiles of `U`, `O` and `S` that the scan makes.
    fn scan_tiles(&self) -> [usize; 3] {
        let across = self.columns / self.units.edge;
        [self.substeps, self.tokens, self.key_pad].map(|rows| rows / self.units.edge * across)
    }

    /// Subgroups of a scan that is not wide which share a tile of `U`.
    fn split(&self) -> usize {
        let [tiles, ..] = self.scan_tiles();
        let steps = [
            self.key_tiles() / self.parts[0],
            self.substeps / self.units.edge,
        ];
        (0..usize::BITS)
            .map(|i| 1 << i)
            .take_while(|&split| {
                tiles * split <= self.groups.max(tiles)
                    && steps.iter().all(|n: &usize| n.is_multiple_of(split))
            })
            .last()
            .unwrap_or(1)
    }

    /// How often the scan fills the place of its parts for a chunk.
    fn stages(&self) -> usize {
        let [left, _, writes] = self.parts;
        match self.together {
            _ if self.wide => self.parts.iter().sum(),
            0 => 2 + 2 * left + writes,
            1 => 2 + writes,
            _ => 2,
        }
    }

    /// Subgroups of a scan that is not wide which make `O`, and the first of those that change the state. Where both is done
    /// at the same time, so many that the one who makes most products makes few.
    fn output_groups(&self) -> [usize; 2] {
        let [_, outputs, state] = self.scan_tiles();
        let steps = self.substeps / self.units.edge;
        if self.together < 2 || self.groups < 2 {
            return [self.groups, 0];
        }
        let some = (1..self.groups)
            .min_by_key(|&some| {
                (outputs.div_ceil(some) * (self.key_tiles() + steps))
                    .max(state.div_ceil(self.groups - some) * steps)
            })
            .unwrap_or(1);
        [some, some]
    }

    /// How many tiles of `U`, `O` and `S` a subgroup has, at most.
    fn scan_tile_rounds(&self) -> [usize; 3] {
        let [u, outputs, state] = self.scan_tiles();
        let [some, first] = self.output_groups();
        [
            (u * self.split()).div_ceil(self.groups),
            outputs.div_ceil(some),
            state.div_ceil(self.groups - first),
        ]
    }

    /// The pass that is the scan.
    pub fn scan(&self) -> Pass {
        if self.wide {
            Pass::MatrixScanWide
        } else {
            Pass::MatrixScan
        }
    }

    fn scan_threads(&self) -> usize {
        if self.wide {
            self.groups * self.units.subgroup
        } else {
            SCAN_THREADS
        }
    }

    /// Where the scan is not wide, rows of `T`, of a part of `W`, of one of `Q`, of `A` and of a part of `writes`, and vec4s of
    /// float16 in each.
    fn slices(&self) -> [[usize; 2]; 5] {
        let [left, _, writes] = self.parts;
        let (across, steps) = (self.key_pad / left / 4, self.substeps / 4);
        [
            [self.substeps, steps],
            [self.substeps, across],
            [self.tokens, across],
            [self.tokens, steps],
            [self.substeps / writes, self.key_pad / 4],
        ]
    }

    /// How often all its threads take a vector of each.
    fn slice_rounds(&self) -> [usize; 5] {
        self.slices().map(|[rows, quads]| self.rounds(rows * quads))
    }

    /// Where it is wide, rows of a part of `left`, of `lower` and of `writes`, and vec4s of float16 in each.
    fn part_sizes(&self) -> [[usize; 2]; 3] {
        let rows = self.substeps + self.tokens;
        let [left, lower, writes] = self.parts;
        [
            [rows, self.key_pad / left / 4],
            [rows, self.substeps / lower / 4],
            [self.substeps / writes, self.key_pad / 4],
        ]
    }

    /// How many vectors of four columns a lane of the wide scan has: of a tile, of S, and of U.
    fn items(&self) -> [usize; 3] {
        let edge = self.units.edge;
        let each = edge * edge / 4 / self.units.subgroup;
        let tiles = [
            1,
            self.key_tiles() / self.share,
            self.substeps / edge / self.share,
        ];
        tiles.map(|tiles| tiles * each)
    }

    /// Vectors that a thread of the wide scan takes of a part, at most.
    fn part_rounds(&self) -> usize {
        let vectors = self.part_vectors().into_iter().max().unwrap_or(0);
        self.rounds(vectors)
    }

    /// How many parts ahead the wide scan asks for them.
    fn ahead(&self) -> usize {
        if self.parts.iter().sum::<usize>().is_multiple_of(2) {
            2
        } else {
            1
        }
    }

    /// vec4s of float16 of each part.
    fn part_vectors(&self) -> [usize; 3] {
        self.part_sizes().map(|[rows, quads]| rows * quads)
    }

    /// How often all threads of the scan take one of `count` things, so that each is taken.
    fn rounds(&self, count: usize) -> usize {
        count.div_ceil(self.scan_threads())
    }

    /// Whether a subgroup of the scan is a team, which owns columns between the products.
    fn team_is_subgroup(&self) -> bool {
        (self.columns * self.units.subgroup).is_multiple_of(SCAN_THREADS)
    }

    /// Threads of a team.
    fn team(&self) -> usize {
        if self.team_is_subgroup() {
            self.units.subgroup
        } else {
            32
        }
    }

    /// Columns of a team.
    fn own(&self) -> usize {
        self.columns / (SCAN_THREADS / self.team())
    }

    /// How often a team takes a vector each, so that all are taken: of a column of S, and of all its columns of U.
    fn team_rounds(&self) -> [usize; 2] {
        [self.key_pad / 4, self.substeps / 4 * self.own()]
            .map(|vectors| vectors.div_ceil(self.team()))
    }

    /// Whether what an invocation of the scan holds fits the arrays of its shader.
    fn fits_registers(&self) -> bool {
        let steps = self.substeps / self.units.edge;
        let tiles = [self.substeps, self.tokens, self.key_pad].map(|rows| rows / self.units.edge);
        if tiles.iter().any(|tiles| !tiles.is_multiple_of(self.share)) {
            return false;
        }
        let pairs = self.pairs_rounds().into_iter().all(|rounds| rounds <= 32)
            && self.solve_rounds(0).into_iter().all(|rounds| rounds <= 16);
        let masked = tiles[1] / self.share * steps;
        if self.wide {
            let [each, state, u] = self.items();
            let lanes = self.units.subgroup;
            // Four registers for each vector of S, and as many for its sums.
            return each * lanes * 4 == self.units.edge.pow(2)
                && 4 * state * lanes <= 16 * 128
                && state <= 32
                && u <= 16
                && steps * each <= 32
                && masked <= 32
                && self.ahead() * self.part_rounds() <= 64
                && (self.key_pad / 4).div_ceil(self.scan_threads()) <= 4
                && pairs;
        }
        let [state, u] = self.team_rounds();
        let [tiles, outputs, state_tiles] = self.scan_tile_rounds();
        2 * tiles.max(state_tiles) <= 32
            && 2 * outputs <= 16
            && self.slice_rounds().into_iter().all(|rounds| rounds <= 32)
            && (self.key_tiles() / self.parts[0]).max(steps) <= 16
            && state * self.own() <= 16
            && u <= 16
            && pairs
    }

    /// How often all threads of the pairs pass but the first take four elements of `L`, and of `A`.
    fn solve_rounds(&self, first: usize) -> [usize; 2] {
        [self.substeps, self.tokens]
            .map(|rows| (rows * self.substeps / 4).div_ceil(self.pairs_threads() - first))
    }

    /// Bytes of workgroup memory of each pass, each variable rounded up to 16.
    fn pairs_memory(&self) -> usize {
        let edge = self.units.edge;
        let n = self.substeps / self.tokens;
        let pitch = self.key_pad / self.slabs / 4 + 2;
        let lower_pitch = self.substeps / 4 + 2;
        let rows = ((self.substeps + self.tokens) * pitch).max(self.substeps * lower_pitch)
            + self.substeps * pitch.max(lower_pitch);
        let [down, across] = self.small_tiles();
        let quads = self.key_pad / 4;
        let totals = self.tokens / self.run * quads;
        let products = totals + (totals + quads).max(down * across * edge * edge / 4);
        let blocks = self.substeps / BLOCK;
        let work = blocks * (blocks + 1) / 2 * BLOCK * 5;
        let masked = self.tokens * (self.substeps / 4 + 1);
        let w = self.substeps * (quads / self.slabs + 1);
        let solve = if self.apart {
            work.max(masked)
        } else {
            work + masked
        };
        let w = if self.w_over { w } else { totals + w };
        8 * rows
            + 16 * products.max(solve).max(w)
            + 4 * (n + 2 + self.factors) * self.tokens
            + 4 * self.pairs_threads()
            + 128
    }

    fn scan_memory(&self) -> usize {
        // (Rows of an odd number of pairs.)
        if self.wide {
            let parts = self
                .part_sizes()
                .map(|[rows, quads]| rows * 2 * ((quads / 2) | 1));
            let part = parts.into_iter().max().unwrap_or(0);
            let pitch = self.units.edge / 4 + 2;
            let unpadded = if self.share > 1 { 2 } else { 0 };
            let operand = self.key_pad.max(self.substeps) * (pitch - unpadded);
            return 8 * part
                + self.groups / self.share * 8 * operand
                + self.groups * 16 * (self.units.edge * pitch + self.units.edge / 4)
                + 4 * self.key_pad;
        }
        let [t, w, q, a, writes] = self
            .slices()
            .map(|[rows, quads]| rows * 2 * ((quads / 2) | 1));
        let part = match self.together {
            0 => t.max(w).max(q).max(a).max(writes),
            1 => (t + w).max(q + a).max(writes),
            _ => (t + w).max(q + a + writes),
        };
        let rows = (self.split() * self.substeps).max(self.key_pad + self.tokens);
        8 * part
            + 4 * self.columns * (rows + 4)
            + 2 * self.columns * (self.key_pad + self.substeps + 16)
            + 8 * self.columns
            + 32
            + 4 * self.columns
    }

    /// No fewer loop iterations than an invocation of the scan needs for a chunk, where its loops are not written out.
    pub fn scan_iterations(&self) -> usize {
        if self.wide {
            let [each, state, u] = self.items();
            let (keys, steps) = (self.key_tiles(), self.substeps / self.units.edge);
            let rows = steps + self.tokens / self.units.edge;
            let parts = self.parts.iter().sum::<usize>() * (1 + 2 * self.part_rounds());
            let products = keys * (1 + rows) + steps * (1 + 2 * rows) + steps * (1 + keys);
            let passed = (steps + rows + keys + rows) * (2 + each);
            let between = 2 * state + 5 * u + self.units.subgroup.ilog2() as usize;
            return parts + products + passed + between + 2 * rows + keys + 16;
        }
        let [tiles, outputs, state_tiles] = self.scan_tile_rounds();
        let slices = self.slice_rounds().into_iter().sum::<usize>();
        let [state, u] = self.team_rounds();
        let (across, steps) = (self.key_tiles(), self.substeps / self.units.edge);
        let parts = self.parts.iter().sum::<usize>();
        let stores = self.rounds(self.tokens * self.columns / 4);
        let levels = self.team().ilog2() as usize;
        let columns =
            levels + self.own() * (5 + levels + 2 * state + 3 * u) + state * (1 + self.own());
        let contents = u * (14 + self.split());
        let products = (tiles + 2 * outputs) * (across + steps + 6 * parts)
            + state_tiles * (steps + 2 + 2 * parts);
        columns + contents + parts * (2 + 2 * slices) + products + 5 * stores + 12
    }

    /// Bounds of the loops that are written out, see [`super::shaders::unroll`].
    pub fn unrolled(&self) -> Vec<(&'static str, usize)> {
        let [tiles, output_tiles, state_tiles] = self.scan_tile_rounds();
        let [t, w, q, a, writes] = self.slice_rounds();
        let split = self.split();
        let steps = self.substeps / self.units.edge;
        let [state, u] = self.team_rounds();
        let [each, state_items, step_items] = self.items();
        let edge = self.units.edge;
        let [pairs, small] = self.pairs_rounds();
        let subgroups = self.pairs_threads() / self.units.subgroup;
        let [triangle, masked] = self.solve_rounds(0);
        let [triangle_helps, masked_helps] = self.solve_rounds(self.substeps);
        vec![
            ("SPLIT", split),
            ("SPLIT_ACROSS", self.key_tiles() / self.parts[0] / split),
            ("SPLIT_LOWER", steps / split),
            ("U_TILE_ROUNDS", tiles),
            ("OUTPUT_TILE_ROUNDS", output_tiles),
            ("STATE_TILE_ROUNDS", state_tiles),
            ("LEFT_PARTS", self.parts[0]),
            ("LOWER_PARTS", self.parts[1]),
            ("WRITE_PARTS", self.parts[2]),
            ("PART_ACROSS", self.key_tiles() / self.parts[0]),
            ("PART_STEPS", steps / self.parts[2]),
            ("LEFT_ACROSS", self.key_tiles() / self.parts[0]),
            ("LOWER_ACROSS", steps / self.parts[1]),
            ("WRITE_STEPS", steps / self.parts[2]),
            ("LOWER_TILES", steps),
            ("SHARE", self.share),
            ("OWN_KEYS", self.key_tiles() / self.share),
            ("OWN_LOWER", steps / self.share),
            ("OWN_TOKENS", self.tokens / edge / self.share),
            ("EACH", each),
            ("STATE_ITEMS", state_items),
            ("STEP_ITEMS", step_items),
            ("LEVELS", (4 * self.units.subgroup / edge).ilog2() as usize),
            ("AHEAD", self.ahead()),
            ("PART_ROUNDS", self.part_rounds()),
            ("DECAY_ROUNDS", self.rounds(self.key_pad / 4)),
            ("T_ROUNDS", t),
            ("W_ROUNDS", w),
            ("Q_ROUNDS", q),
            ("A_ROUNDS", a),
            ("WRITE_ROUNDS", writes),
            ("STATE_ROUNDS", state),
            ("OWN", self.own()),
            ("U_ROUNDS", u),
            ("TEAM_LEVELS", self.team().ilog2() as usize),
            ("OUTPUT_ROUNDS", self.rounds(self.tokens * self.columns / 4)),
            ("TRIANGLE_ROUNDS", triangle),
            ("MASKED_ROUNDS", masked),
            ("TRIANGLE_HELPS", triangle_helps),
            ("MASKED_HELPS", masked_helps),
            ("LANE_LEVELS", self.units.subgroup.ilog2() as usize),
            ("QUAD_LEVELS", self.units.subgroup.ilog2() as usize - 2),
            ("W_ROWS", steps / self.w_split()),
            (
                "W_JOB_ROUNDS",
                (self.key_tiles() / self.slabs * self.w_split()).div_ceil(subgroups),
            ),
            (
                "W_VECTOR_ROUNDS",
                (self.substeps * self.key_pad / 4 / self.slabs).div_ceil(self.pairs_threads()),
            ),
            ("N", self.substeps / self.tokens),
            ("OWN_SLABS", self.own_slabs),
            ("RUN", self.run),
            ("FACTORS", self.factors),
            ("RUNS", self.tokens / self.run),
            ("TILE_BLOCKS", self.tokens.ilog2() as usize - 3),
            ("SLAB_TILES", self.key_tiles() / self.slabs),
            ("PAIR_ROUNDS", pairs),
            ("PRODUCT_ROUNDS", small),
            ("BLOCK", BLOCK),
            (
                "MERGES",
                (self.substeps / BLOCK).next_power_of_two().ilog2() as usize,
            ),
            (
                "MERGE_ROUNDS",
                (self.substeps / self.units.edge)
                    .pow(2)
                    .div_ceil(8)
                    .div_ceil(subgroups),
            ),
        ]
    }

    /// Override constants of a pass of this tier, beyond those of the problem.
    pub fn constants(&self, pass: Pass) -> Vec<(&'static str, f64)> {
        let mut out = vec![("CHUNK", self.tokens), ("KP", self.key_pad)];
        match pass {
            Pass::MatrixPairs => out.extend([
                ("THREADS", self.pairs_threads()),
                ("SUBGROUPS", self.pairs_threads() / self.units.subgroup),
                ("RUN", self.run),
                ("SLABS", self.slabs),
                ("OWN_SLABS", self.own_slabs),
                ("W_OVER", usize::from(self.w_over)),
                ("W_SPLIT", self.w_split()),
                ("APART", usize::from(self.apart)),
                ("ALL_CHANNELS", usize::from(self.key_pad == self.key_dim)),
            ]),
            Pass::MatrixScanWide => out.extend([
                ("VB", self.columns),
                ("THREADS", self.scan_threads()),
                ("LANES", self.units.subgroup),
                ("SHARE", self.share),
                ("LEFT_PARTS", self.parts[0]),
                ("LOWER_PARTS", self.parts[1]),
                ("WRITE_PARTS", self.parts[2]),
            ]),
            _ => out.extend([
                ("VB", self.columns),
                ("THREADS", SCAN_THREADS),
                ("GROUPS", self.groups),
                ("SPLIT", self.split()),
                ("OUTPUT_GROUPS", self.output_groups()[0]),
                ("STATE_FROM", self.output_groups()[1]),
                ("TOGETHER", self.together),
                ("TEAM", self.team()),
                ("TEAM_IS_SUBGROUP", usize::from(self.team_is_subgroup())),
                ("LEFT_PARTS", self.parts[0]),
                ("WRITE_PARTS", self.parts[2]),
            ]),
        }
        out.into_iter().map(|(name, x)| (name, x as f64)).collect()
    }
}
