//! One file per resource of the public surface: each reads a request, asks the house, and answers.

pub mod chat;
pub mod credits;
pub mod me;
pub mod models;
mod replay;
pub mod requests;
