//! The kinds of errors for which the engine could not compute a step, sample a row, or be started.
//! Pure: `runner` says which kind an error of the models or of the kernels is.

/// The text of each variant is for logs and operators, never for clients.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A step, its rows or its results contradict each other: a bug of this program. The step's
    /// sequences fail and the engine goes on.
    #[error("{0}")]
    Shape(String),
    /// There is too little memory for a model, its KV cache or a step. The text says what to do.
    #[error("{0}")]
    OutOfMemory(String),
    /// The device refuses every further call until this process ends. The engine ends.
    #[error("{0}")]
    DeviceLost(String),
    /// The scheduler's records of sequences and blocks contradict each other. The engine ends,
    /// because otherwise one client could be given another's tokens.
    #[error("{0}")]
    Integrity(String),
    /// One row has no next token. Its sequence fails and no other.
    #[error("{0}")]
    Sampling(String),
    /// The grammar of one row's answer cannot be followed any further. Its sequence fails and no
    /// other; the model is not at fault.
    #[error("{0}")]
    Grammar(String),
    /// The device or a library refused a computation. The step's sequences fail and the engine goes
    /// on if the runner can recover.
    #[error("{0}")]
    Compute(String),
    /// A model's files are missing, damaged or of a kind that this build or this machine cannot
    /// run, or the model was not loaded. The text says what to do.
    #[error("{0}")]
    NotLoaded(String),
    /// A file of a model is gone or another one than the one that was qualified. The text names it.
    #[error("{0}")]
    FilesChanged(String),
    /// What proved the model does not hold any more. The text says why and what to do.
    #[error("{0}")]
    Unproven(String),
    /// A loaded model computes other tokens than when it was qualified.
    #[error("{0}")]
    WrongAnswers(String),
    /// A panic, with its message. One during a step fails that step's sequences; one anywhere else
    /// ends the engine.
    #[error("a panic: {0}")]
    Panicked(String),
    /// `EngineHandle::shutdown` was called, or every handle was dropped.
    #[error("it was shut down")]
    ShutDown,
    /// The engine ended, for this reason, before the sequence did.
    #[error("the engine has stopped: {0}")]
    Stopped(Box<EngineError>),
}

impl EngineError {
    /// Whether the device can be used no more before this process has ended.
    pub fn is_device_lost(&self) -> bool {
        match self {
            Self::DeviceLost(_) => true,
            Self::Stopped(reason) => reason.is_device_lost(),
            _ => false,
        }
    }

    /// The label under which logs and metrics tell the errors apart.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Shape(_) => "shape",
            Self::OutOfMemory(_) => "out_of_memory",
            Self::DeviceLost(_) => "device_lost",
            Self::Integrity(_) => "integrity",
            Self::Sampling(_) => "sampling",
            Self::Grammar(_) => "grammar",
            Self::Compute(_) => "compute",
            Self::NotLoaded(_) => "not_loaded",
            Self::FilesChanged(_) => "files_changed",
            Self::Unproven(_) => "unproven",
            Self::WrongAnswers(_) => "wrong_answers",
            Self::Panicked(_) => "panic",
            Self::ShutDown => "shut_down",
            Self::Stopped(reason) => reason.kind(),
        }
    }
}
