//! One error type for the whole crate; each variant is a different thing for a caller to do.

/// What went wrong, and which number was over which limit.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An input does not fit the problem: a missing or extra tensor, a wrong shape or length, a value
    /// outside its range. The caller mends the input.
    #[error("tensor `{tensor}`: expected {expected}, found {found}")]
    Tensor {
        /// Name of the tensor, as in the file format (`q`, `cu_seqlens`, …).
        tensor: String,
        /// What a correct input would have had.
        expected: String,
        /// What was there.
        found: String,
    },
    /// A size, option or combination that this build or this adapter does not run.
    #[error("unsupported: {what} is {found}, the limit is {limit}")]
    Unsupported {
        /// The quantity (`key_dim`, `chunk`, `storage buffers per stage`, …).
        what: String,
        /// What was asked for.
        found: String,
        /// What is possible.
        limit: String,
    },
    /// No adapter matches the request.
    #[error("no adapter: {0}")]
    NoAdapter(String),
    /// The device could not be opened, or refused something that should have been valid.
    #[error("device error: {0}")]
    Device(String),
    /// The device is gone (reset, unplugged, driver watchdog). Open a new one; states on it are lost.
    #[error("the device was lost: {0}")]
    DeviceLost(String),
    /// The device, or the machine where the CPU engine runs, has too little memory for this request. Nothing was
    /// computed; the engine is usable.
    #[error("out of memory while allocating {what} ({bytes} bytes)")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Size of the allocation that failed.
        bytes: u64,
    },
    /// The adapter computed a wrong answer on a small known case, so nothing else it says can be trusted.
    #[error(
        "self-test failed on {adapter}: {case} has a relative error of {error:.2e}, at most {limit:.0e} is right"
    )]
    SelfTest {
        /// Adapter name.
        adapter: String,
        /// The case that failed.
        case: String,
        /// Relative l2 error found.
        error: f64,
        /// Largest error that would have passed.
        limit: f64,
    },
    /// A file could not be read or written.
    #[error("{path}: {message}")]
    File {
        /// Path as given.
        path: String,
        /// Reason.
        message: String,
    },
}

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::Tensor`] from anything printable.
    pub fn tensor(
        tensor: impl Into<String>,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Tensor {
            tensor: tensor.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// An [`Error::Unsupported`] from anything printable.
    pub fn unsupported(
        what: impl Into<String>,
        found: impl std::fmt::Display,
        limit: impl std::fmt::Display,
    ) -> Self {
        Self::Unsupported {
            what: what.into(),
            found: found.to_string(),
            limit: limit.to_string(),
        }
    }
}
