//! The built-in handler: it records every order in the table `orders`, as it is.

use async_trait::async_trait;

use crate::handler::{Failure, Handler};
use crate::model::delivery::Delivery;
use crate::store::Tx;

/// Keeps subject, position, time and payload of each order byte for byte; it neither parses nor judges them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Orders;

#[async_trait]
impl Handler for Orders {
    async fn apply(&self, tx: &mut Tx<'_>, deliveries: &[&Delivery]) -> Result<(), Failure> {
        tx.record_orders(deliveries).await?;
        Ok(())
    }
}
