//! Named places where tests stop, delay or break the running node. They exist in builds with the
//! feature `failpoints` only; elsewhere the macro expands to nothing.
//!
//! The variable `FAILPOINTS`, such as `name=1*off->return;other=sleep(50)`, sets the action at each
//! place.

#[cfg(feature = "failpoints")]
#[doc(hidden)]
pub use fail;

/// `failpoint!("name")` ends the process on `return`, as a crash would. With a closure,
/// `return(text)` leaves the function with the closure's value for the text. `panic` and
/// `sleep(ms)` work everywhere.
#[cfg(feature = "failpoints")]
#[macro_export]
macro_rules! failpoint {
    ($name:literal) => {
        $crate::failpoint::fail::fail_point!($name, |_| std::process::abort())
    };
    ($name:literal, $value:expr) => {
        $crate::failpoint::fail::fail_point!($name, $value)
    };
}

#[cfg(not(feature = "failpoints"))]
#[macro_export]
macro_rules! failpoint {
    ($($any:tt)*) => {};
}

/// Reads `FAILPOINTS` and keeps its actions in force until the returned guard is dropped.
#[cfg(feature = "failpoints")]
pub fn arm() -> impl Sized {
    fail::FailScenario::setup()
}

#[cfg(not(feature = "failpoints"))]
pub fn arm() -> impl Sized {}
