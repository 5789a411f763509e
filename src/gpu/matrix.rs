//! The matrix tier: products on the adapter's matrix units (float16 operands, float32 sums and state), where the
//! adapter has them. What it needs of a device, and how its passes cut the work.

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
    /// The matrix units of an adapter: square tiles of float16 with float32 sums, subgroups of one size, and
    /// storage buffers enough. `None` where the matrix tier cannot run.
    pub fn of(adapter: &wgpu::Adapter) -> Option<Self> {
        use wgpu::CooperativeScalarType::{F16, F32};
        let info = adapter.get_info();
        let subgroup = info.subgroup_min_size as usize;
        if !adapter.features().contains(FEATURES)
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
    /// float32 words of scratch memory for one chunk of one head.
    pub floats: usize,
    /// Pairs of float16 of scratch memory for one chunk of one head.
    pub halves: usize,
    /// Value columns a workgroup of the scan.
    pub columns: usize,
    /// Subgroups of the scan: each takes a share of the rows of `U` over `O`, and of those of `S`.
    pub groups: usize,
    /// Threads of the pairs pass.
    pub pairs_threads: usize,
}

/// Threads of the solve pass, as in `shaders/matrix_solve.wgsl`.
const SOLVE_THREADS: usize = 256;

impl MatrixShape {
    /// The shape for chunks of `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the passes do not fit the device.
    pub fn new(
        problem: &Problem,
        tokens: usize,
        units: MatrixUnits,
        limits: &wgpu::Limits,
    ) -> Result<Self> {
        let factors = problem.rule.update().factors;
        let n = problem.rule.update().substeps();
        let (c, r, kp) = (tokens, n * tokens, problem.key_dim.next_multiple_of(16));
        if r > 64 {
            return Err(Error::unsupported(
                "chunk · sub-steps per token on matrix units",
                format!("{tokens} · {n}"),
                64,
            ));
        }
        let contents = c * factors;
        let pairs_threads = (kp / 4 * (c / 4)).next_multiple_of(64);
        let row_tiles = (r + c) / units.edge;
        let of = |groups| Self {
            units,
            floats: (r + c) * r + kp + 4,
            halves: ((r + c) * (kp + contents) + r * kp) / 2,
            columns: 16,
            groups,
            pairs_threads,
        };
        // Three subgroups were fastest on the one card measured; more where a subgroup's share would be too large.
        let shape = [3, 2, 1]
            .into_iter()
            .chain(4..=row_tiles)
            .filter(|&groups| row_tiles.is_multiple_of(groups))
            .map(of)
            .find(|shape| shape.fits_registers(c, r, kp, contents))
            .ok_or_else(|| {
                Error::unsupported(
                    format!("key_dim on matrix units for chunks of {tokens}"),
                    problem.key_dim,
                    "what the registers of a subgroup hold",
                )
            })?;
        let memory = limits.max_compute_workgroup_storage_size as usize;
        for (what, bytes) in [
            ("pairs", shape.pairs_memory(n, c, kp, factors)),
            ("solve", shape.solve_memory(c, r)),
            ("scan", shape.scan_memory(c, r, kp, contents)),
        ] {
            if bytes > memory {
                return Err(Error::unsupported(
                    format!("workgroup memory of matrix_{what} for chunks of {tokens}"),
                    format!("{bytes} bytes"),
                    format!("{memory} bytes"),
                ));
            }
        }
        let threads = pairs_threads.max(SOLVE_THREADS).max(shape.scan_threads());
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

    fn scan_threads(&self) -> usize {
        self.groups * self.units.subgroup
    }

    /// Whether what an invocation of the scan holds fits the arrays of `shaders/matrix_scan.wgsl`.
    fn fits_registers(&self, c: usize, r: usize, kp: usize, contents: usize) -> bool {
        let edge = self.units.edge;
        let rows = (r + c) / edge / self.groups;
        let state = (kp / edge).div_ceil(self.groups);
        let across = self.columns / edge;
        let each = |count: usize| count.div_ceil(self.scan_threads());
        rows * ((kp + contents) / edge) <= 128
            && state * (r / edge) <= 128
            && rows.max(state) * across <= 64
            && each(kp * self.columns / 4) <= 64
            && each(contents * self.columns / 4) <= 32
    }

    /// Bytes of workgroup memory of each pass, each variable rounded up to 16.
    fn pairs_memory(&self, n: usize, c: usize, kp: usize, factors: usize) -> usize {
        let edge = self.units.edge;
        let pitch = kp + 8;
        let down = ((n + 1) * c / 2).next_multiple_of(edge);
        let across = (n * c / 2).next_multiple_of(edge);
        2 * (down + across) * pitch
            + 4 * down * across
            + 16 * (c / 4) * (kp / 4)
            + 4 * (n * c + (2 + factors) * c)
            + 4 * (kp / 4 * (c / 4)).next_multiple_of(64)
            + 96
    }

    /// vec4s of the solve pass's two arrays, as `shaders/matrix_solve.wgsl` uses them.
    fn solve_arrays(&self, c: usize, r: usize) -> [usize; 2] {
        let tiles = 2 * SOLVE_THREADS / self.units.subgroup * self.units.edge.pow(2);
        let mut merge = 1;
        let mut size = 16;
        while size < r {
            merge = merge.max(r.div_ceil(2 * size) * size * size / 4);
            size *= 2;
        }
        [
            (r * (r / 4 + 1)).max(tiles / 4),
            merge.max(r * (c / 4 + 1)).max(c * r / 4),
        ]
    }

    fn solve_memory(&self, c: usize, r: usize) -> usize {
        16 * self.solve_arrays(c, r).iter().sum::<usize>() + 2 * (r + c) * (r + 8) + 96
    }

    fn state_rows(&self, kp: usize) -> usize {
        (kp / self.units.edge).next_multiple_of(self.groups) * self.units.edge
    }

    fn scan_memory(&self, c: usize, r: usize, kp: usize, contents: usize) -> usize {
        4 * self.columns * (self.state_rows(kp) + r + c)
            + 2 * (kp + contents).max(r) * (self.columns + 8)
            + 96
    }

    /// No fewer loop iterations than an invocation of the scan needs for a chunk.
    pub fn scan_iterations(&self, tokens: usize, substeps: usize, kp: usize) -> usize {
        let (c, r, edge) = (tokens, substeps, self.units.edge);
        // Each vec4 of S, Z, U and O up to five times (its components, some of them twice).
        let elements = 5 * (2 * kp + 2 * r + 2 * c) * self.columns / 4;
        let across = self.columns / edge;
        let rows = (r + c) / edge / self.groups + 1;
        let state = (kp / edge).div_ceil(self.groups) + 1;
        elements.div_ceil(self.scan_threads())
            + (kp + r) / edge * (rows + across * (rows + 1))
            + r / edge * (state + across * (state + 1))
            + 3 * across * (rows + state)
            + 128
    }

    /// Bounds of the loops that are written out, see [`super::shaders::unroll`].
    pub fn unrolled(
        &self,
        tokens: usize,
        substeps: usize,
        kp: usize,
        factors: usize,
    ) -> Vec<(&'static str, usize)> {
        let edge = self.units.edge;
        let contents = tokens * factors;
        let rounds = |rows: usize| (rows * self.columns / 4).div_ceil(self.scan_threads());
        let row_tiles = (substeps + tokens) / edge;
        vec![
            ("ROW_TILES", row_tiles),
            ("ROWS_EACH", row_tiles / self.groups),
            ("STATE_EACH", (kp / edge).div_ceil(self.groups)),
            ("COLUMN_TILES", self.columns / edge),
            ("LEFT_TILES", (kp + contents) / edge),
            ("WRITE_STEPS", substeps / edge),
            ("STATE_ROUNDS", rounds(kp)),
            ("CONTENT_ROUNDS", rounds(contents)),
            ("OUTPUT_ROUNDS", rounds(tokens)),
            ("U_ROUNDS", rounds(substeps)),
            (
                "TOKENS_EACH",
                (tokens / 4).div_ceil(SOLVE_THREADS / substeps),
            ),
            ("N", substeps / tokens),
            ("LOWER_TILES", substeps / edge),
            ("RUN", 4),
            ("BLOCK", 16),
        ]
    }

    /// Override constants of a pass of this tier, beyond those of the problem.
    pub fn constants(
        &self,
        pass: Pass,
        tokens: usize,
        substeps: usize,
        kp: usize,
    ) -> Vec<(&'static str, f64)> {
        let mut out = vec![("CHUNK", tokens as f64), ("KP", kp as f64)];
        match pass {
            Pass::MatrixPairs => out.extend([
                ("THREADS", self.pairs_threads as f64),
                (
                    "SUBGROUPS",
                    (self.pairs_threads / self.units.subgroup) as f64,
                ),
            ]),
            Pass::MatrixSolve => {
                let subgroups = SOLVE_THREADS / self.units.subgroup;
                let [work, side] = self.solve_arrays(tokens, substeps);
                out.extend([
                    ("SUBGROUPS", subgroups as f64),
                    ("WORK_SIZE", work as f64),
                    ("SIDE_SIZE", side as f64),
                ]);
            }
            _ => out.extend([
                ("VB", self.columns as f64),
                ("THREADS", self.scan_threads() as f64),
                ("GROUPS", self.groups as f64),
            ]),
        }
        out
    }
}
