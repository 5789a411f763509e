//! Which state of a pool each row of a decode batch continues.

use crate::error::{Error, Result};
use std::collections::HashMap;

/// One row of a decode batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Slot of the pool whose state this row continues; `-1` is padding: the row's output is zero and no
    /// state is touched.
    pub slot: i32,
    /// Starts from a zero state instead of what the slot holds.
    pub reset: bool,
}

impl Row {
    /// A padding row.
    pub const PADDING: Row = Row {
        slot: -1,
        reset: false,
    };

    /// Continues the state in `slot`.
    pub const fn continues(slot: i32) -> Row {
        Row { slot, reset: false }
    }

    /// Starts `slot` from a zero state.
    pub const fn starts(slot: i32) -> Row {
        Row { slot, reset: true }
    }

    /// Whether this row is padding.
    pub fn is_padding(&self) -> bool {
        self.slot < 0
    }
}

/// Checks a batch's rows against a pool: one row per batch entry, slots in range, none named twice (two
/// rows would race for one state).
///
/// # Errors
/// [`Error::Tensor`] naming `slots` and the offending row.
pub fn validate_rows(rows: &[Row], batch: usize, slots: usize) -> Result<()> {
    if rows.len() != batch {
        return Err(Error::tensor(
            "slots",
            format!("one slot for each of the {batch} batch rows"),
            rows.len(),
        ));
    }
    let mut taken = HashMap::with_capacity(batch);
    for (i, row) in rows.iter().enumerate() {
        match usize::try_from(row.slot) {
            Ok(slot) if slot < slots => {
                if let Some(first) = taken.insert(slot, i) {
                    return Err(Error::tensor(
                        "slots",
                        "each slot at most once in a batch",
                        format!("slot {slot} in rows {first} and {i}"),
                    ));
                }
            }
            Err(_) if row.slot == -1 => {}
            _ => {
                return Err(Error::tensor(
                    "slots",
                    format!("-1 (padding) or a slot below {slots}"),
                    format!("{} in row {i}", row.slot),
                ));
            }
        }
    }
    Ok(())
}
