//! Reads server-sent events (`text/event-stream`) from bytes, however they arrive.

/// What a stream brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEvent {
    /// The data of one event; its lines are joined.
    Data(String),
    /// A comment, which keeps the connection alive.
    Comment,
}

/// Lines end with LF or CRLF. Fields other than `data` are passed over.
#[derive(Debug, Default)]
pub struct EventReader {
    pending: Vec<u8>,
    /// Bytes of `pending` that were read.
    read: usize,
    /// The lines of the event that has begun.
    data: Option<String>,
}

impl EventReader {
    pub fn push(&mut self, bytes: &[u8]) {
        self.pending.drain(..self.read);
        self.read = 0;
        self.pending.extend_from_slice(bytes);
    }

    /// The next event that is complete.
    pub fn next_event(&mut self) -> Option<ServerEvent> {
        loop {
            let rest = &self.pending[self.read..];
            let end = rest.iter().position(|byte| *byte == b'\n')?;
            let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
            self.read += end + 1;
            if line.is_empty() && self.data.is_some() {
                return self.data.take().map(ServerEvent::Data);
            }
            if line.starts_with(b":") {
                return Some(ServerEvent::Comment);
            }
            if let Some(more) = line.strip_prefix(b"data:") {
                let more = String::from_utf8_lossy(more.strip_prefix(b" ").unwrap_or(more));
                match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(&more);
                    }
                    None => self.data = Some(more.into_owned()),
                }
            }
        }
    }

    /// The data of the next event; comments are passed over.
    pub fn next_data(&mut self) -> Option<String> {
        loop {
            if let ServerEvent::Data(data) = self.next_event()? {
                return Some(data);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_arrive_in_pieces_of_any_length() {
        for (text, expect) in [
            ("data: a\n\ndata: [DONE]\n\n", &["a", "[DONE]"][..]),
            ("data:a\r\n\r\n: keep-alive\r\n\r\ndata:b\r\n\r\n", &["a", ":", "b"]),
            ("event: chunk\nid: 7\ndata: a\ndata: b\n\n", &["a\nb"]),
            ("data:  é\n\n", &[" é"]),
            ("data: without an end\n", &[]),
            ("\n\n", &[]),
        ] {
            for length in 1..=text.len() {
                let (mut reader, mut found) = (EventReader::default(), Vec::new());
                for piece in text.as_bytes().chunks(length) {
                    reader.push(piece);
                    while let Some(event) = reader.next_event() {
                        found.push(match event {
                            ServerEvent::Data(data) => data,
                            ServerEvent::Comment => ":".to_owned(),
                        });
                    }
                }
                assert_eq!(found, expect, "{text:?} by {length}");
            }
        }
    }
}
