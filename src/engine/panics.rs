//! Panics of runners as errors of their engine.

use super::error::EngineError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls the runner, and turns its panic into an error.
pub(super) fn catch_panic<T>(
    call: impl FnOnce() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panicked(panic.as_ref())))
}

pub(super) fn panicked(panic: &(dyn Any + Send)) -> EngineError {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    EngineError::Panicked(text.unwrap_or("without a message").to_owned())
}
