//! Tests the node from outside, in one binary: a file per subject.

#![allow(
    clippy::disallowed_methods,
    unreachable_pub,
    reason = "tests measure time, start threads and share helpers"
)]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod advisories;
mod agents;
mod api;
mod backup;
mod bench;
mod budgets;
mod capabilities;
mod charges;
mod cli;
mod clients;
mod clock;
mod cluster;
mod completions;
mod continued;
mod control_plane;
mod counting;
mod crash;
mod crash_points;
mod dashboards;
mod database;
mod door;
mod edge;
mod embed;
mod families;
mod first_commands;
mod formats;
mod formats_on_gpu;
mod gateway_bounds;

mod hostile;
mod idempotency;
mod install;
mod isolation;
mod launch;
mod lifecycle;
mod logs;
mod model_pool;
mod models;
mod moving;
mod neighbours;
mod old_folders;
mod openapi;
mod operator;
mod outages;
mod page;
mod prices;
mod process;
mod qualify;
mod quantised_folders;
mod races;
mod raw;
mod receipts;
mod release;
mod reload;
mod remote_admin;
mod secrecy;
mod service;
mod sessions;
mod soak;
mod speculation;
mod sse;
mod stalled;
mod start;
mod storage;
mod support;
mod text_goldens;
mod text_parity;
mod text_parity_templates;
mod tidy;
mod tls;
mod tool_calls;
mod traces;
mod unavailable;
mod upgrade;
mod volley;
