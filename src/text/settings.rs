//! What a rendering of a chat template may cost, and what formats of answers leave open.

use cresset_base::section;

section! {
/// What one rendering of a release's chat template may cost. A release whose template needs more
/// cannot be qualified.
pub struct TemplateSettings {
    /// Steps of the template's program.
    #[schemars(range(min = 1_000, max = 1 << 30))]
    pub max_steps: u64 = 300_000,
    /// All texts and lists that it makes on the way, the prompt among them, MiB.
    #[schemars(range(min = 1, max = 1 << 14))]
    pub max_written_mib: usize = 32,
}
}

section! {
/// What formats of answers leave open.
pub struct FormatSettings {
    /// Objects of a schema that names properties, and does not say whether there may be others, may
    /// have others. Small models then invent them until max_tokens.
    pub open_objects: bool = false,
    /// The most members of an object whose schema names none and gives no number. Small models add
    /// members until max_tokens.
    #[schemars(range(min = 1, max = 100_000))]
    pub max_members: usize = 64,
}
}
