//! The daemon with the built-in handler. With a handler of your own, this is all there is to write.

use std::process::ExitCode;

fn main() -> ExitCode {
    order_processor::main(order_processor::handler::orders::Orders)
}
