//! Why a release has no witness.

use crate::Error;

/// Why there is no witness.
#[derive(Debug)]
pub enum Absence {
    /// candle has no such model, or it is too large: the reason in a sentence.
    Unknown(String),
    Failed(Error),
}

impl From<candle_core::Error> for Absence {
    fn from(error: candle_core::Error) -> Self {
        Self::Failed(error.into())
    }
}

impl From<std::io::Error> for Absence {
    fn from(error: std::io::Error) -> Self {
        candle_core::Error::from(error).into()
    }
}

impl From<Absence> for Error {
    fn from(absence: Absence) -> Self {
        match absence {
            Absence::Unknown(why) => Self::Unsupported(why),
            Absence::Failed(error) => error,
        }
    }
}

pub(super) type WitnessResult<T> = std::result::Result<T, Absence>;

pub(super) fn unknown<T>(why: impl Into<String>) -> WitnessResult<T> {
    Err(Absence::Unknown(why.into()))
}
