//! How decode cuts the states of a pool into workgroups.

use super::shaders::{Constant, LoopBound, WORKGROUP_WORDS};
use crate::engine::Element;
use crate::problem::Problem;

/// Which columns of a state a thread holds; a text of its own for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ThreadColumns {
    /// Two, as many columns apart as threads lie side by side, read and written an element at a time: for any `V`, and
    /// for pools that start anywhere.
    TwoApart,
    /// Two side by side, by one load and one store.
    Two,
    /// Four side by side.
    Four,
}

impl ThreadColumns {
    /// How many.
    pub fn count(self) -> usize {
        match self {
            ThreadColumns::TwoApart | ThreadColumns::Two => 2,
            ThreadColumns::Four => 4,
        }
    }

    /// Elements of the states that are read and written at once.
    pub fn at_once(self) -> usize {
        match self {
            ThreadColumns::TwoApart => 1,
            side_by_side => side_by_side.count(),
        }
    }
}

/// A shape of decode's workgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodeShape {
    /// Value columns that a workgroup holds at a time, a power of two.
    pub columns: usize,
    /// Threads of a workgroup, a power of two from 64 to 256.
    pub threads: usize,
    /// Columns of a thread.
    pub thread_columns: ThreadColumns,
    /// Vectors are loaded by four channels, where the operands lie so.
    pub by_four: bool,
    /// What one token of one factor alone allows: states stay in registers as they were loaded.
    pub once: bool,
    /// Blocks of columns that a workgroup takes one after the other; more than one needs `once`.
    pub blocks: usize,
    /// Loops over channels are written out rather than left to the driver.
    pub written_out: bool,
}

/// The shape for a problem with states stored as `state`. This is the place to change it; what does not fit a problem is
/// replaced, in the end by [`DecodeShape::ANY`].
pub fn decode_shape(problem: &Problem, state: Element) -> DecodeShape {
    let chosen = match state {
        Element::F32 => DecodeShape::ANY,
        Element::F16 => DecodeShape::ANY,
    };
    // For more than one token, or one factor a token.
    let several = DecodeShape {
        once: false,
        blocks: 1,
        ..chosen
    };
    [chosen, several]
        .into_iter()
        .find(|shape| shape.fits(problem))
        .unwrap_or(DecodeShape::ANY)
}

impl DecodeShape {
    /// A shape for every problem, and every place of its operands.
    pub const ANY: Self = Self {
        columns: 64,
        threads: 128,
        thread_columns: ThreadColumns::TwoApart,
        by_four: false,
        once: false,
        blocks: 1,
        written_out: false,
    };

    /// Value columns that a workgroup takes in all.
    pub fn span(&self) -> usize {
        self.columns * self.blocks
    }

    /// Groups of threads, each with channels of its own.
    fn groups(&self) -> usize {
        self.threads * self.thread_columns.count() / self.columns
    }

    /// Channels of a group, a multiple of 4.
    fn channels(&self, problem: &Problem) -> usize {
        problem.key_dim.div_ceil(self.groups()).next_multiple_of(4)
    }

    /// float32 words of workgroup memory.
    fn workgroup_words(&self, problem: &Problem) -> usize {
        let quads = self.groups() * self.channels(problem) / 4;
        // (A vec3 takes the place of a vec4.)
        let vectors = 4 * quads * if self.by_four { 7 } else { 6 };
        let partials = 3 * self.threads * self.thread_columns.count() * self.blocks.min(2);
        let norms = if problem.normalize {
            (2 + problem.rule.update().factors).next_multiple_of(4) + self.threads
        } else {
            8
        };
        vectors + partials + 16 + norms
    }

    /// Whether a problem can be decoded so, where its operands lie as the shape asks.
    pub fn fits(&self, problem: &Problem) -> bool {
        let one = problem.tokens == 1 && problem.rule.update().factors == 1;
        let width = self.thread_columns.count();
        (one || !self.once)
            && (self.once || self.blocks == 1)
            && self.columns.is_multiple_of(width)
            && self.threads * width >= self.columns
            // MOST_CHANNELS of the texts: what a thread may hold in registers.
            && self.channels(problem) * width <= 128
            && problem.value_dim.is_multiple_of(self.thread_columns.at_once())
            && self.workgroup_words(problem) <= WORKGROUP_WORDS
    }

    /// Override constants that come on top of [`super::shaders::constants`].
    pub fn constants(&self, problem: &Problem) -> Vec<Constant> {
        let mut out = vec![
            ("THREADS", self.threads as f64),
            ("COLUMNS", self.columns as f64),
            ("BLOCKS", self.blocks as f64),
            ("ONCE", f64::from(u8::from(self.once))),
            ("KG", self.channels(problem) as f64),
        ];
        if !problem.normalize {
            out.extend([("NORM_COUNT", 1.0), ("NORM_PARTS", 1.0)]);
        }
        out
    }

    /// Bounds of the loops to be written out, see [`super::shaders::unroll`].
    pub fn unrolled(&self, problem: &Problem) -> Vec<LoopBound> {
        if self.written_out {
            vec![("KG4", self.channels(problem) / 4)]
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::Rule;

    #[test]
    fn a_shape_that_does_not_fit_is_replaced() {
        let four = DecodeShape {
            columns: 128,
            thread_columns: ThreadColumns::Four,
            by_four: true,
            once: true,
            ..DecodeShape::ANY
        };
        let problem = |tokens, key_dim, value_dim| {
            Problem::new(Rule::Eda, [2, tokens, 1, 1, key_dim, value_dim])
        };
        assert!(four.fits(&problem(1, 128, 128)));
        assert!(four.fits(&problem(1, 3, 4)));
        // Two tokens, columns that are no multiple of four, twice the registers.
        assert!(!four.fits(&problem(2, 128, 128)));
        assert!(!four.fits(&problem(1, 128, 129)));
        assert!(!four.fits(&problem(1, 256, 128)));
        for rule in Rule::ALL {
            for size in 1..=256 {
                for normalize in [false, true] {
                    let mut problem = Problem::new(rule, [1, 3, 1, 1, size, size]);
                    problem.normalize = normalize;
                    assert!(DecodeShape::ANY.fits(&problem), "{rule} {size}");
                }
            }
        }
    }
}
