//! The errors of ops.

/// The errors of an op. A shape error is a bug of the caller; it names the op and the sizes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{op}: {detail}")]
    Shape { op: &'static str, detail: String },
    #[error("{op}: unsupported {detail}")]
    Unsupported { op: &'static str, detail: String },
    /// Says what is missing and what to do.
    #[error("no GPU can be used: {0}")]
    NoDevice(String),
    /// The device refused or failed; the work under way is lost.
    #[error("{op}: the device failed: {detail}")]
    Device { op: &'static str, detail: String },
    /// The device has too little free memory for an allocation. It goes on working.
    #[error("{op}: the device failed: {detail}")]
    OutOfMemory { op: &'static str, detail: String },
    /// The device failed for good: it refuses every further call until the process ends.
    #[error("{op}: the device failed: {detail}")]
    DeviceLost { op: &'static str, detail: String },
    /// Another of the devices that compute a model together failed, so this one cannot go on. The
    /// detail says which and why.
    #[error("{op}: {detail}")]
    GroupLost { op: &'static str, detail: String },
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

pub(crate) fn unsupported(op: &'static str, detail: String) -> Error {
    Error::Unsupported { op, detail }
}

pub(crate) fn shape(op: &'static str, detail: String) -> Error {
    Error::Shape { op, detail }
}

/// Fails with a shape error that says `detail` unless `ok`.
pub(crate) fn ensure(op: &'static str, ok: bool, detail: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(shape(op, detail())) }
}
