//! One file per resource of the public surface. Each reads a request, asks the node, and answers.

pub mod chat;
pub mod count;
pub mod credits;
pub mod me;
pub mod models;
pub mod requests;
