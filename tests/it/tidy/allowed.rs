//! What breaks a rule today. These lists may only get shorter: who mends an entry removes it.

/// Pure files that reach a clock, a task or a tensor.
pub const IMPURE: &[&str] = &[];

/// Files outside `server/wire` that shape the public API.
pub const WIRE_TYPES: &[&str] = &[];

/// Folders of kernels without a reference or tests.
pub const KERNELS: &[&str] = &[];

/// Files with lines of more than 100 columns that are no test's and no literal's.
pub const LONG_LINES: &[&str] = &[];

/// `share` while too many lines are long.
pub const SHARE: &[&str] = &[];

/// Files with a function of more than 70 lines.
pub const FUNCTIONS: &[&str] = &[];

/// `percentile` while the typical function is too long.
pub const PERCENTILE: &[&str] = &[];

/// Product files with more than 500 lines of code.
pub const LARGE_FILES: &[&str] = &[];

/// Type names that are defined in more than one file.
pub const TYPE_NAMES: &[&str] = &[];

/// Metrics that no document explains.
pub const METRICS: &[&str] = &[];
