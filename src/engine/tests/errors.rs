//! Errors of the models and of the kernels become the engine's kinds, and keep their texts.

use crate::EngineError;
use crate::runner::step_error;
use cresset_kernels::Error as KernelError;
use cresset_models::Error as ModelError;

#[test]
fn errors_of_models_and_kernels_have_a_kind() {
    let check = |error: ModelError, kind: &str| {
        let words = error.to_string();
        let step = step_error("the step failed", &error);
        assert_eq!((step.kind(), step.to_string()), (kind, format!("the step failed: {words}")));
        let load = EngineError::from(error);
        assert_eq!((load.kind(), load.to_string()), (kind, words));
    };
    let (op, text) = ("gemm", || "why".to_owned());
    check(ModelError::Batch(text()), "shape");
    check(KernelError::Shape { op, detail: text() }.into(), "shape");
    check(ModelError::OutOfMemory(text()), "out_of_memory");
    check(KernelError::OutOfMemory { op, detail: text() }.into(), "out_of_memory");
    check(KernelError::DeviceLost { op, detail: text() }.into(), "device_lost");
    check(KernelError::Device { op, detail: text() }.into(), "compute");
    check(candle_core::Error::Msg(text()).into(), "compute");
    check(ModelError::BadFile(text()), "not_loaded");
    check(ModelError::Changed(text()), "files_changed");
    check(ModelError::Unsupported(text()), "not_loaded");
    check(KernelError::Unsupported { op, detail: text() }.into(), "not_loaded");
    check(KernelError::NoDevice(text()).into(), "not_loaded");
}
