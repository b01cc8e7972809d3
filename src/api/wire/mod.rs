//! The shapes of queries, bodies and objects on the wire. Only this module knows field names.

mod answer_format;
pub mod chat_request;
pub mod chat_schema;
pub mod completion;
#[cfg(test)]
mod fuzz;
pub mod json;
mod json_schema;
pub mod messages;
mod near_names;
pub mod objects;
pub mod prompt_facts;
#[cfg(test)]
mod published_schemas;
pub mod query;
pub mod raw_prompt;
mod schemas;
mod structural_tag;
#[cfg(test)]
mod tests;
mod tools;
