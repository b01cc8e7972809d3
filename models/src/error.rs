//! What can fail when a model is loaded or computed.

use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A model file is damaged, truncated or not what its name says. The text names the file and
    /// what to do.
    #[error("{0}")]
    BadFile(String),
    /// A file of a release is gone or another one than the one that was qualified. The text names
    /// it and what to do.
    #[error("{0}")]
    Changed(String),
    /// The file is sound but asks for something this build does not have.
    #[error("{0}")]
    Unsupported(String),
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A batch that contradicts itself, the model or the cache: a bug of the caller, found before
    /// anything is computed.
    #[error("batch: {0}")]
    Batch(String),
    /// A device has too little memory. The text says what takes it and what to do.
    #[error("{0}")]
    OutOfMemory(String),
    #[error(transparent)]
    Kernel(#[from] cresset_kernels::Error),
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error of a call that has nothing to collect.
    pub(crate) fn nothing_launched() -> Self {
        Self::Batch("nothing was launched".into())
    }
}

pub(crate) fn damaged(path: &Path, what: &str) -> Error {
    Error::BadFile(format!("{} is damaged or incomplete: {what}; fetch it again", path.display()))
}
