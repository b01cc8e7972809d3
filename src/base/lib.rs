//! What every part of the node may use: ids, time, files and locks, the memory of the machine,
//! places where tests break the node, and the form of a section of settings. It knows no other
//! part.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod clock;
pub mod durable_file;
pub mod engine_stats;
pub mod failpoint;
pub mod file_lock;
pub mod ids;
pub mod memory;
#[cfg(feature = "testing")]
pub mod mutate;
pub mod recent;
pub mod server_sent_events;
pub mod settings;
pub mod text_table;
