//! The priority of threads that work in the background.

use std::io;

/// The nice value of these threads: every other thread that has work goes before them.
#[cfg(target_os = "linux")]
const LOWEST_PRIORITY: i32 = 19;

/// Lets every other thread go before this one and those that it starts. On Linux a nice value
/// belongs to a thread; elsewhere it would be the whole process's, and nothing is changed.
pub fn lower_thread_priority() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::setpriority_process(None, LOWEST_PRIORITY)?;
    Ok(())
}
