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

mod clock;
mod disk_reserve;
pub mod durable_file;
mod engine_stats;
pub mod failpoint;
mod file_lock;
mod ids;
pub mod memory;
#[cfg(feature = "testing")]
mod mutate;
mod recent;
mod server_sent_events;
pub mod settings;
mod shown_text;
pub mod text_table;
mod thread_priority;

pub use clock::{Clock, SystemClock, UnixMillis, built_at, shown_now};
pub use disk_reserve::{DiskReserve, NoSpace};
pub use engine_stats::EngineStats;
pub use file_lock::FileLock;
pub use ids::{
    AccountId, ApplicationId, AttemptId, BootId, CredentialId, ModelId, RequestId, SessionId,
    hyphenated,
};
#[cfg(feature = "testing")]
pub use mutate::{Mutation, mutated};
pub use recent::Recent;
pub use server_sent_events::{EventReader, ServerEvent};
pub use shown_text::{escaped, is_direction_mark, is_unseen};
pub use thread_priority::lower_thread_priority;
