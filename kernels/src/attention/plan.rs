//! How the keys of the sequences that decode are cut into pieces, and which pieces are computed one
//! after the other. Pure: the same lengths give the same plan.
//!
//! A block of decode's kernel computes one share of the work for one tile of heads: some pieces,
//! each of them a range of keys of one sequence. All tiles of heads have the same shares. The sizes
//! of shares differ by little, so a long sequence beside many short ones is computed by as many
//! blocks as its part of all keys asks for, and no multiprocessor waits for another.

use std::ops::Range;

/// Keys of a tile: pieces begin and end at multiples of it, or where a sequence does.
pub const TILE: usize = 64;

/// The blocks of decode's kernel that a device runs at once, and what they are needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeGrid {
    pub multiprocessors: usize,
    /// Blocks that one multiprocessor runs at once.
    pub resident: usize,
    /// Blocks with which a multiprocessor's memory is expected to be busy. More of them would cut
    /// few sequences into more pieces, all of which must be merged.
    pub enough: usize,
    /// Tiles of query heads, each of which reads the keys of one KV head.
    pub head_tiles: usize,
}

impl DecodeGrid {
    /// The number of shares when `sequences` decode.
    pub fn shares(&self, sequences: usize) -> usize {
        let few = sequences * self.head_tiles < self.enough * self.multiprocessors;
        self.shares_for(if few { self.enough.min(self.resident) } else { self.resident })
    }

    /// The most shares that any number of sequences has.
    pub fn most_shares(&self) -> usize {
        self.shares(1).max(self.shares(usize::MAX / self.head_tiles.max(1)))
    }

    /// The smallest number of shares that keeps `resident` blocks of each multiprocessor equally
    /// busy, within a tenth.
    fn shares_for(&self, resident: usize) -> usize {
        let (blocks, head_tiles) = (self.multiprocessors * resident.max(1), self.head_tiles.max(1));
        let is_even = |shares: &usize| {
            let items = shares * head_tiles;
            items.div_ceil(blocks) * blocks * 10 <= items * 11
        };
        // Ten items for each block are always even enough.
        let least = (blocks / head_tiles).max(1);
        (least..=10 * blocks).find(is_even).unwrap_or(least)
    }
}

/// Where the keys of a sequence may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyCuts {
    /// At any tile, as the lengths of all sequences ask for.
    Anywhere,
    /// At all multiples of this number of tokens, itself a multiple of [`TILE`], and nowhere else:
    /// the pieces of a sequence depend on its own length alone.
    Every(usize),
}

impl KeyCuts {
    /// Cuts that depend on the longest context and the most pieces of a sequence alone.
    pub fn fixed(max_context: usize, most_pieces: usize) -> Self {
        // With fewer tokens, merging would cost too much: 256 tokens are read as 128 KiB at 128
        // dimensions, and the sums of a group of four heads take 2 KiB.
        Self::Every(max_context.div_ceil(most_pieces.max(1)).next_multiple_of(TILE).max(256))
    }

    /// The most partial results of a plan for `sequences`, none of which has more than
    /// `most_pieces` pieces where cuts are fixed.
    pub fn most_partials(self, sequences: usize, most_shares: usize, most_pieces: usize) -> usize {
        match self {
            // A cut ends a share and leaves at most two pieces that stand beside it alone.
            Self::Anywhere => 2 * most_shares.saturating_sub(1),
            Self::Every(_) => sequences * most_pieces,
        }
    }
}

/// Keys of one sequence that one block computes for a tile of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyPiece {
    pub sequence: u32,
    /// The first key, and the one behind the last.
    pub begin: u32,
    pub end: u32,
    /// The number of its partial result, or [`KeyPiece::ONLY`].
    pub partial: u32,
}

impl KeyPiece {
    /// Stands for a partial result where the piece is the only one of its sequence, whose result is
    /// written at once.
    pub const ONLY: u32 = u32::MAX;
    /// Words of a piece on the device.
    pub const WORDS: usize = 4;

    pub fn words(&self) -> [u32; Self::WORDS] {
        [self.sequence, self.begin, self.end, self.partial]
    }
}

/// The work of decode's attention for one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecodePlan {
    /// The pieces of each sequence are in the order of its keys; each has at least one.
    pub pieces: Vec<KeyPiece>,
    /// The first piece of each share, and then the number of pieces.
    pub shares: Vec<u32>,
    /// The first partial result of each sequence, and then their number. Those of a sequence are
    /// merged in their order; a sequence of one piece has none.
    pub partials: Vec<u32>,
}

impl DecodePlan {
    /// Plans the attention of the last query of each sequence, of `lens` tokens, over the keys that
    /// it sees. Shares are numbered up to the grid's most, so that the plan's sizes are known
    /// ahead; some may be empty.
    pub fn new(lens: &[u32], window: Option<usize>, cuts: KeyCuts, grid: &DecodeGrid) -> Self {
        let keys = lens.iter().map(|len| visible_keys(*len as usize, window));
        let tiles = keys.clone().map(|keys| tiles(&keys)).sum();
        let mut dealer = Dealer::new(tiles, grid.shares(lens.len()));
        let mut plan = Self { partials: vec![0], ..Self::default() };
        for (sequence, keys) in keys.enumerate() {
            plan.cut(sequence as u32, keys, cuts, &mut dealer);
        }
        plan.shares = dealer.starts;
        plan.shares.resize(grid.most_shares() + 1, plan.pieces.len() as u32);
        plan
    }

    /// Adds the pieces of a sequence.
    fn cut(&mut self, sequence: u32, keys: Range<usize>, cuts: KeyCuts, dealer: &mut Dealer) {
        let first = self.pieces.len();
        let mut begin = keys.start;
        loop {
            let left = tiles(&(begin..keys.end));
            let taken = match cuts {
                KeyCuts::Anywhere => dealer.take_some(left, self.pieces.len()),
                KeyCuts::Every(tokens) => {
                    let next = (begin / tokens + 1) * (tokens / TILE) - begin / TILE;
                    dealer.take_all(left.min(next), self.pieces.len())
                }
            };
            let end = ((begin / TILE + taken) * TILE).min(keys.end);
            let [begin_word, end_word] = [begin, end].map(|key| key as u32);
            let partial = KeyPiece::ONLY;
            self.pieces.push(KeyPiece { sequence, begin: begin_word, end: end_word, partial });
            if end == keys.end {
                break;
            }
            begin = end;
        }
        self.number_partials(first);
    }

    /// Numbers the partial results of the sequence whose pieces begin at `first`.
    fn number_partials(&mut self, first: usize) {
        let mut next = self.partials.last().copied().unwrap_or(0);
        if let pieces @ [_, _, ..] = &mut self.pieces[first..] {
            for piece in pieces {
                piece.partial = next;
                next += 1;
            }
        }
        self.partials.push(next);
    }
}

/// The keys that the last query of `len` tokens sees.
fn visible_keys(len: usize, window: Option<usize>) -> Range<usize> {
    window.map_or(0, |window| len.saturating_sub(window))..len
}

/// Tiles that hold some of the keys.
fn tiles(keys: &Range<usize>) -> usize {
    if keys.is_empty() { 0 } else { keys.end.div_ceil(TILE) - keys.start / TILE }
}

/// The fewest tiles of a share that ends within a sequence: on an H200 one row of 32 tiles takes
/// 12.6 µs in 16 pieces, and 16.5 in 32, of which merging takes 7.
const LEAST_TILES: usize = 2;

/// Deals tiles out to one share after the other.
struct Dealer {
    /// Tiles that no share has taken, and shares that have not begun.
    tiles: usize,
    shares: usize,
    /// Tiles that the share of now still takes.
    room: usize,
    /// How many more it takes if it then ends with a sequence: that saves a piece.
    slack: usize,
    /// The most tiles of a share that ends so.
    most: usize,
    /// The first piece of each share that has begun.
    starts: Vec<u32>,
}

impl Dealer {
    fn new(tiles: usize, shares: usize) -> Self {
        let most = tiles * 109 / (shares.max(1) * 100);
        let mut dealer = Self { tiles, shares, room: 0, slack: 0, most, starts: Vec::new() };
        dealer.begin_share(0);
        dealer
    }

    /// Larger shares come first. Blocks are dealt out to multiprocessors in turn, so all of these
    /// get equally many of them.
    fn begin_share(&mut self, piece: usize) {
        let shares = self.shares.max(1);
        self.room = self.tiles.div_ceil(shares).max(LEAST_TILES);
        self.slack = self.most.saturating_sub(self.room);
        self.shares = shares - 1;
        self.starts.push(piece as u32);
    }

    /// Takes as many of the tiles as the share has room for, and returns how many. `piece` is the
    /// number of the piece that they will be.
    fn take_some(&mut self, tiles: usize, piece: usize) -> usize {
        self.make_room(tiles, piece);
        let taken = if tiles <= self.room + self.slack { tiles } else { self.room };
        self.take(taken)
    }

    /// Takes all of the tiles. A share ends once it has its part of the work.
    fn take_all(&mut self, tiles: usize, piece: usize) -> usize {
        self.make_room(tiles, piece);
        self.take(tiles)
    }

    fn make_room(&mut self, tiles: usize, piece: usize) {
        if self.room == 0 && tiles > 0 {
            self.begin_share(piece);
        }
    }

    fn take(&mut self, tiles: usize) -> usize {
        self.room = self.room.saturating_sub(tiles);
        self.tiles -= tiles;
        tiles
    }
}

#[cfg(test)]
mod tests;
