//! What a start tells the person who watches it.

/// An event that is told to the person who watches a start.
#[derive(Debug)]
pub enum StartEvent {
    Note(String),
    /// Work that lasts until the next event or the end of the start.
    Doing(String),
    /// This process is the node from now on.
    TookOver,
}

/// Receives the events of a start, in order.
pub(super) type Watcher<'a> = &'a mut (dyn FnMut(StartEvent) + Send);
